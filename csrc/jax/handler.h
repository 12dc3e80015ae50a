// What the handlers of all ops have in common: their platforms, arrays, attributes, and exceptions as XLA's errors.
#pragma once

#include <xla/ffi/api/ffi.h>

#include <exception>
#include <functional>
#include <initializer_list>
#include <new>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "common/error.h"
#include "jax/host.h"
#include "losses/row_kernels.h"

#define FUSEGRAD_TEXT(name) xla::ffi::StructMember<std::string_view>(#name)
#define FUSEGRAD_INT(name) xla::ffi::StructMember<int64_t>(#name)
#define FUSEGRAD_INTS(name) xla::ffi::StructMember<std::span<const int64_t>>(#name)
#define FUSEGRAD_REAL(name) xla::ffi::StructMember<double>(#name)
#define FUSEGRAD_BOOL(name) xla::ffi::StructMember<bool>(#name)

// XLA decodes its own Span alone.
template <>
struct xla::ffi::AttrDecoding<std::span<const int64_t>> {
  using Type = std::span<const int64_t>;
  static std::optional<Type> Decode(XLA_FFI_AttrType type, void* attribute, DiagnosticEngine& diagnostic) {
    const auto span = AttrDecoding<Span<const int64_t>>::Decode(type, attribute, diagnostic);
    return span ? std::optional<Type>({span->begin(), span->size()}) : std::nullopt;
  }
};

namespace fusegrad::jax {

namespace ffi = xla::ffi;
using Array = ffi::AnyBuffer;
using Result = ffi::Result<ffi::AnyBuffer>;

struct Device {
  const RowKernels* kernels;
  void* stream;  ///< the CPU's: a cpu::Host
  bool cpu;
};

inline void require(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(std::string("fusegrad.jax: a custom call must get ") + what);
}

inline void* data(const Array& array) { return array.element_count() == 0 ? nullptr : array.untyped_data(); }

// Exceptions must not leave a handler.
template <class Function>
ffi::Error guarded(Function&& function) {
  try {
    function();
    return ffi::Error::Success();
  } catch (const std::bad_alloc& error) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, error.what());
  } catch (const std::out_of_range& error) {
    return ffi::Error(ffi::ErrorCode::kOutOfRange, error.what());
  } catch (const NotImplementedError& error) {
    return ffi::Error(ffi::ErrorCode::kUnimplemented, error.what());
  } catch (const std::logic_error& error) {
    return ffi::Error::InvalidArgument(error.what());
  } catch (const std::exception& error) {
    return ffi::Error::Internal(error.what());
  }
}

// The device that each platform's context stands for.
struct Cpu {
  using Context = ffi::ThreadPool;
  static void call(ffi::ThreadPool pool, const std::function<void(const Device&)>& function) {
    cpu::Host host = host_of(pool);
    function({&kCpuRowKernels, &host, /*cpu=*/true});
  }
  static constexpr std::initializer_list<ffi::Traits> kTraits = {};
};

#ifdef FUSEGRAD_WITH_CUDA
// A command buffer records what a handler launches and launches it again without the handler: memory comes from XLA as
// arguments and results, never from an allocator of the call.
struct Cuda {
  using Context = ffi::PlatformStream<void*>;
  static void call(void* stream, const std::function<void(const Device&)>& function) {
    function({&kCudaRowKernels, stream, /*cpu=*/false});
  }
  static constexpr std::initializer_list<ffi::Traits> kTraits = {ffi::Traits::kCmdBufferCompatible};
};
#endif

// Adds each of `Buffers` to a handler's signature.
template <class Binding, class Function>
auto bind(Binding&& binding, Function* function, std::initializer_list<ffi::Traits> traits) {
  return std::forward<Binding>(binding).To(function, traits);
}
template <class Buffer, class... Buffers, class Binding, class Function>
auto bind(Binding&& binding, Function* function, std::initializer_list<ffi::Traits> traits) {
  if constexpr (std::is_same_v<Buffer, Array>) {
    return jax::bind<Buffers...>(std::forward<Binding>(binding).template Arg<Array>(), function, traits);
  } else if constexpr (std::is_same_v<Buffer, Result>) {
    return jax::bind<Buffers...>(std::forward<Binding>(binding).template Ret<Array>(), function, traits);
  } else if constexpr (std::is_same_v<Buffer, ffi::RemainingArgs>) {
    return jax::bind<Buffers...>(std::forward<Binding>(binding).RemainingArgs(), function, traits);
  } else {
    return jax::bind<Buffers...>(std::forward<Binding>(binding).RemainingRets(), function, traits);
  }
}

template <class Platform, auto kFunction>
struct Handler;
template <class Platform, class Attributes, class... Buffers,
          void (*kFunction)(const Device&, const Attributes&, Buffers...)>
struct Handler<Platform, kFunction> {
  using Context = typename Platform::Context;

  static ffi::Error call(typename ffi::CtxDecoding<Context>::Type context, Attributes attributes, Buffers... buffers) {
    return guarded(
        [&] { Platform::call(context, [&](const Device& device) { kFunction(device, attributes, buffers...); }); });
  }
  static XLA_FFI_Error* handle(XLA_FFI_CallFrame* frame) {
    static const auto handler = jax::bind<Buffers...>(
        ffi::Ffi::Bind().template Ctx<Context>().template Attrs<Attributes>(), call, Platform::kTraits);
    return handler->Call(frame);
  }
};

}  // namespace fusegrad::jax

// The symbols that python/fusegrad/jax/_library.py registers.
#define FUSEGRAD_EXPORT_ON(platform, Platform, name)                                            \
  extern "C" XLA_FFI_Error* fusegrad_jax_##platform##_##name(XLA_FFI_CallFrame* frame) {        \
    return fusegrad::jax::Handler<fusegrad::jax::Platform, fusegrad::jax::name>::handle(frame); \
  }
#ifdef FUSEGRAD_WITH_CUDA
#define FUSEGRAD_EXPORT(name)        \
  FUSEGRAD_EXPORT_ON(cpu, Cpu, name) \
  FUSEGRAD_EXPORT_ON(cuda, Cuda, name)
#else
#define FUSEGRAD_EXPORT(name) FUSEGRAD_EXPORT_ON(cpu, Cpu, name)
#endif
