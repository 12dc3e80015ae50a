#include <fusegrad/build_info.h>

#include "common/build.h"

namespace fusegrad {

const BuildInfo& build_info() {
  static const BuildInfo info{
      .version = build().version,
      .torch_version = FUSEGRAD_TORCH_VERSION,
      .cuda = build().cuda,
      .cuda_version = build().cuda_version,
      .cuda_archs = build().cuda_archs,
      .cuda_status = build().cuda_status,
      .compiler = build().compiler,
  };
  return info;
}

}  // namespace fusegrad
