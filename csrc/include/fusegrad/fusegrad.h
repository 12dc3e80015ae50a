// fusegrad: fused losses whose gradients cannot be silently wrong. Include this one header.
#pragma once

#include "fusegrad/check_targets.h"
#include "fusegrad/cross_entropy.h"
#include "fusegrad/flex_attention.h"
#include "fusegrad/jsd.h"
#include "fusegrad/linear_cross_entropy.h"
#include "fusegrad/linear_jsd.h"
#include "fusegrad/options.h"
#include "fusegrad/reductions.h"
#include "fusegrad/score_mod.h"
