// flex_attention as XLA's custom calls; attention_call.h says what they get. On CUDA the memory that a plan wants is a
// result of the call, so that XLA lays it out among its own temporaries and may record the call in a command buffer:
// whoever lowers a program asks fusegrad_jax_flex_scratch how many bytes that is.
#include <optional>

#include "attention/cpu/flex_attention.h"
#include "jax/attention_call.h"
#include "jax/handler.h"
#include "jit/front_end.h"

#ifdef FUSEGRAD_WITH_CUDA
#include "cuda/attention/flex_attention.h"
#include "cuda/attention/plan/program.h"
#include "jit/compile.h"
#endif

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(fusegrad::jax::FlexAttributes, FUSEGRAD_TEXT(score_mod), FUSEGRAD_TEXT(mask_mod),
                                      FUSEGRAD_REAL(scale), FUSEGRAD_REAL(dropout_p), FUSEGRAD_BOOL(bshd),
                                      FUSEGRAD_INT(lists), FUSEGRAD_INT(block_q), FUSEGRAD_INT(block_kv),
                                      FUSEGRAD_BOOL(max_scores), FUSEGRAD_BOOL(low), FUSEGRAD_BOOL(deterministic),
                                      FUSEGRAD_BOOL(grad_out), FUSEGRAD_BOOL(grad_lse), FUSEGRAD_INTS(wanted),
                                      FUSEGRAD_INTS(scalars));

namespace fusegrad::jax {
namespace {

score_mod::DType element_type(ffi::DataType type) {
  switch (type) {
    case ffi::F64:
      return score_mod::DType::kFloat64;
    case ffi::F32:
      return score_mod::DType::kFloat32;
    case ffi::BF16:
      return score_mod::DType::kBFloat16;
    case ffi::F16:
      return score_mod::DType::kFloat16;
    case ffi::S64:
      return score_mod::DType::kInt64;
    case ffi::S32:
      return score_mod::DType::kInt32;
    case ffi::S16:
      return score_mod::DType::kInt16;
    case ffi::S8:
      return score_mod::DType::kInt8;
    case ffi::U8:
      return score_mod::DType::kUInt8;
    case ffi::PRED:
      return score_mod::DType::kBool;
    case ffi::U32:  // a seed
      return score_mod::DType::kInt32;
    default:
      fail<ValueError>("flex_attention: a custom call must get arrays of dtypes that a score_mod may capture");
  }
}

FlexArray array_of(const Array& array) {
  const auto sizes = array.dimensions();
  return {data(array), element_type(array.element_type()), {sizes.begin(), sizes.size()}};
}

template <class Call>
void run_on_cpu(const cpu::Host& host, const Call& call) {
  if constexpr (std::is_same_v<Call, FlexForwardCall>) {
    cpu::attention_forward(host, call.of, call.results);
  } else if constexpr (std::is_same_v<Call, FlexBackwardCall>) {
    cpu::attention_backward(host, call);
  } else {
    cpu::attention_tangents(host, call);
  }
}

template <class CallOf>
void run_flex(const Device& device, const FlexAttributes& attributes, ffi::RemainingArgs args,
              ffi::RemainingRets rets) {
  std::vector<FlexArray> arguments, results;
  for (size_t i = 0; i < args.size(); ++i) arguments.push_back(array_of(*args.get<Array>(i)));
  for (size_t i = 0; i < rets.size(); ++i) results.push_back(array_of(**rets.get<Array>(i)));
  FlexArrays of_arguments(arguments), of_results(results);
  const CallOf made(attributes, of_arguments, of_results, device.cpu);
  if (device.cpu) return run_on_cpu(*static_cast<const cpu::Host*>(device.stream), made.call);
#ifdef FUSEGRAD_WITH_CUDA
  const FlexArray& scratch = of_results.next();
  const auto plan = cuda::plan_of(made.call);
  FUSEGRAD_CHECK(ValueError, plan->scratch.bytes() <= scratch.sizes[0],
                 "flex_attention: a program must run on a GPU "
                 "like the one that it was lowered for: its calls bring ",
                 scratch.sizes[0], " bytes of scratch memory, but this one needs ", plan->scratch.bytes());
  cuda::run(*plan, made.call, scratch.data, static_cast<CUstream_st*>(device.stream));
#endif
}

void flex_forward(const Device& device, const FlexAttributes& call, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  run_flex<FlexForwardOf>(device, call, args, rets);
}
void flex_backward(const Device& device, const FlexAttributes& call, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  run_flex<FlexBackwardOf>(device, call, args, rets);
}
void flex_tangents(const Device& device, const FlexAttributes& call, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  run_flex<FlexTangentsOf>(device, call, args, rets);
}

}  // namespace
}  // namespace fusegrad::jax

FUSEGRAD_EXPORT(flex_forward)
FUSEGRAD_EXPORT(flex_backward)
FUSEGRAD_EXPORT(flex_tangents)

// The folder of Python's packages, where NVRTC may be.
extern "C" void fusegrad_jax_packages(const char* folder) { fusegrad::jit::add_front_end({nullptr, nullptr, folder}); }

#ifdef FUSEGRAD_WITH_CUDA

namespace fusegrad::jax {
namespace {

// This thread's last call that failed.
thread_local std::string last_error;

// Arrays as integers: the number of score_mod::DType, the rank, the sizes. Where data will lie is aligned, as XLA's is.
std::vector<FlexArray> arrays_of(const int64_t*& numbers, int64_t count) {
  alignas(256) static char somewhere;
  std::vector<FlexArray> arrays;
  for (int64_t i = 0; i < count; ++i) {
    const auto dtype = static_cast<score_mod::DType>(*numbers++);
    const auto rank = static_cast<size_t>(*numbers++);
    const std::span<const int64_t> sizes(numbers, rank);
    numbers += rank;
    bool empty = false;
    for (const int64_t size : sizes) empty |= size == 0;
    arrays.push_back({empty ? nullptr : &somewhere, dtype, sizes});
  }
  return arrays;
}

template <class CallOf>
int64_t scratch_of(const FlexAttributes& attributes, FlexArrays arguments, FlexArrays results, bool wait) {
  const CallOf made(attributes, arguments, results, /*cpu=*/false);
  const auto plan = cuda::plan_of(made.call);
  const std::string& architecture = cuda::Gpu::current().architecture;
  std::vector<jit::Program> programs;
  for (const auto& program : cuda::programs_of(*plan))
    programs.push_back(cuda::flex_program(program->launch.spec, architecture).program);
  for (const jit::Program& program : programs) jit::compile_ahead(program);
  if (wait) {
    for (const jit::Program& program : programs) jit::compile(program);
  }
  return plan->scratch.bytes();
}

}  // namespace
}  // namespace fusegrad::jax

// The bytes of scratch memory of a call on the current GPU, whose kernels begin to be compiled; with `wait` they are
// when it returns. Where there is an
// error, -1 (a value), -2 (not implemented) or -3 (any other), and fusegrad_jax_flex_error() says which. `direction`:
// 0, 1 or 2 of a forward, a backward and tangents. `arrays`: the arguments, then the results without the scratch
// memory.
extern "C" int64_t fusegrad_jax_flex_scratch(int64_t direction, const char* score_mod, const char* mask_mod,
                                             double scale, double dropout_p, const int64_t* flags,
                                             const int64_t* wanted, int64_t wanted_count, const int64_t* scalars,
                                             int64_t scalar_count, const int64_t* arrays, int64_t argument_count,
                                             int64_t result_count, bool wait) {
  using namespace fusegrad;  // NOLINT
  const jax::FlexAttributes attributes{score_mod,
                                       mask_mod,
                                       scale,
                                       dropout_p,
                                       flags[0] != 0,
                                       flags[1],
                                       flags[2],
                                       flags[3],
                                       flags[4] != 0,
                                       flags[5] != 0,
                                       flags[6] != 0,
                                       flags[7] != 0,
                                       flags[8] != 0,
                                       {wanted, static_cast<size_t>(wanted_count)},
                                       {scalars, static_cast<size_t>(scalar_count)}};
  try {
    const auto arguments = jax::arrays_of(arrays, argument_count), results = jax::arrays_of(arrays, result_count);
    const jax::FlexArrays a(arguments), r(results);
    if (direction == 0) return jax::scratch_of<jax::FlexForwardOf>(attributes, a, r, wait);
    if (direction == 1) return jax::scratch_of<jax::FlexBackwardOf>(attributes, a, r, wait);
    return jax::scratch_of<jax::FlexTangentsOf>(attributes, a, r, wait);
  } catch (const NotImplementedError& error) {
    jax::last_error = error.what();
    return -2;
  } catch (const std::logic_error& error) {
    jax::last_error = error.what();
    return -1;
  } catch (const std::exception& error) {
    jax::last_error = error.what();
    return -3;
  }
}

extern "C" const char* fusegrad_jax_flex_error() { return fusegrad::jax::last_error.c_str(); }

#endif
