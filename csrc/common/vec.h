// ATen's vectors: headers alone, which leave no undefined symbol of torch's libraries but SLEEF's functions
// (common/sleef.h). The one header below the front ends that includes any of torch's; tools/check_rooms.py knows
// it. Only for files that are compiled once for each instruction set.
#pragma once

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
