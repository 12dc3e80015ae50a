// The kernels that are compiled at run time, ahead of time: for editors, clang-tidy and nvcc.
#include "flex_config.cuh"

#include "cuda/attention/backward/hopper.cuh"
#include "cuda/attention/backward/hopper_wide.cuh"
#include "cuda/attention/backward/portable.cuh"
#include "cuda/attention/forward/hopper.cuh"
#include "cuda/attention/forward/portable.cuh"
#include "cuda/attention/grad_query/hopper.cuh"
#include "cuda/attention/grad_query/portable.cuh"

namespace {

struct Sums {
  FlexSums of[Config::Derivative::kContributions + 1];
};

}  // namespace

__global__ void __launch_bounds__(64) flex_forward(const __grid_constant__ FlexForwardArguments arguments,
                                                   const __grid_constant__ ScoreMod::Captured score_mod,
                                                   const __grid_constant__ MaskMod::Captured mask_mod) {
  extern __shared__ __align__(16) char shared[];
  FlexForward<Config>(arguments, score_mod, mask_mod, shared_address(shared)).run();
}

__global__ void __launch_bounds__(64)
    flex_backward(const __grid_constant__ FlexBackwardArguments arguments,
                  const __grid_constant__ ScoreMod::Captured score_mod,
                  const __grid_constant__ MaskMod::Captured mask_mod, const __grid_constant__ Sums sums) {
  extern __shared__ __align__(16) char shared[];
  FlexBackward<Config>(arguments, sums.of, score_mod, mask_mod, shared).run();
}

__global__ void __launch_bounds__(64) flex_grad_query(const __grid_constant__ FlexBackwardArguments arguments,
                                                      const __grid_constant__ ScoreMod::Captured score_mod,
                                                      const __grid_constant__ MaskMod::Captured mask_mod) {
  extern __shared__ __align__(16) char shared[];
  FlexGradQuery<Config>(arguments, score_mod, mask_mod, shared_address(shared)).run();
}

__global__ void __launch_bounds__(384, 1) flex_forward_hopper(const __grid_constant__ FlexForwardArguments arguments,
                                                              const __grid_constant__ ScoreMod::Captured score_mod,
                                                              const __grid_constant__ MaskMod::Captured mask_mod,
                                                              const __grid_constant__ FlexForwardHopperArguments more) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(16) char shared[];
  FlexForwardHopper<HopperConfig>(arguments, more, score_mod, mask_mod, shared_address(shared)).run();
#endif
}

__global__ void __launch_bounds__(384, 1)
    flex_backward_hopper(const __grid_constant__ FlexBackwardArguments arguments,
                         const __grid_constant__ ScoreMod::Captured score_mod,
                         const __grid_constant__ MaskMod::Captured mask_mod, const __grid_constant__ Sums sums,
                         const __grid_constant__ FlexBackwardHopperArguments more) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(16) char shared[];
  FlexBackwardHopper<HopperBackwardConfig>(arguments, sums.of, more, score_mod, mask_mod, shared).run();
#endif
}

__global__ void __launch_bounds__(384, 1)
    flex_backward_wide_hopper(const __grid_constant__ FlexBackwardArguments arguments,
                              const __grid_constant__ ScoreMod::Captured score_mod,
                              const __grid_constant__ MaskMod::Captured mask_mod, const __grid_constant__ Sums sums,
                              const __grid_constant__ FlexBackwardHopperArguments more) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(16) char shared[];
  FlexBackwardWideHopper<HopperWideConfig>(arguments, sums.of, more, score_mod, mask_mod, shared).run();
#endif
}

__global__ void __launch_bounds__(384, 1)
    flex_grad_query_hopper(const __grid_constant__ FlexBackwardArguments arguments,
                           const __grid_constant__ ScoreMod::Captured score_mod,
                           const __grid_constant__ MaskMod::Captured mask_mod,
                           const __grid_constant__ FlexBackwardHopperArguments more) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(16) char shared[];
  FlexGradQueryHopper<HopperConfig>(arguments, more, score_mod, mask_mod, shared_address(shared)).run();
#endif
}
