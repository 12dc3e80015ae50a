// Ops that are other ops below.
#pragma once

#include <c10/util/Exception.h>

#include <string>
#include <string_view>
#include <typeinfo>

namespace fusegrad {

/// What `call` returns, which calls `inner`: errors that begin with its name begin with that of `op`, which was called.
template <class Call>
auto errors_name(std::string_view op, std::string_view inner, Call&& call) {
  const auto raise = [&]<class Error>(const Error& error) {
    std::string text = error.what_without_backtrace();
    if (typeid(error) != typeid(Error) || !text.starts_with(inner)) throw;  // which keeps its type
    text.replace(0, inner.size(), op);
    throw Error({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, std::move(text));
  };
  try {
    return call();
  } catch (const c10::IndexError& error) {
    raise(error);
  } catch (const c10::NotImplementedError& error) {
    raise(error);
  } catch (const c10::TypeError& error) {
    raise(error);
  } catch (const c10::ValueError& error) {
    raise(error);
  } catch (const c10::Error& error) {
    raise(error);
  }
  TORCH_INTERNAL_ASSERT(false);
}

}  // namespace fusegrad
