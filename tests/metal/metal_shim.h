// Metal types, attributes, simd and threadgroup operations for g++, so that a generated kernel runs as C++, one fiber
// per thread. Only what this project's kernels and the two guard kernels need; anything else fails to compile.
#pragma once

// Few and small headers: they are most of a kernel's compile time.
#include <stddef.h>
#include <stdint.h>

#include <source_location>
#include <type_traits>

#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")

using uint = unsigned int;
using ushort = unsigned short;
using uchar = unsigned char;
using ulong = unsigned long;

constexpr int SIMD_WIDTH = 32;

// The runtime, metal_runtime.cpp.
extern "C" {
void* shim_shared(int slot, size_t bytes);
void shim_barrier(int flags, int line, int column);
void shim_simdgroup_barrier(int flags, int line, int column);
const unsigned char* shim_exchange(int operation, const void* value, size_t bytes, int line, int column);
uint shim_lanes();
uint shim_lane();
const unsigned char* shim_reduction_order();
}

template <typename To, typename From>
inline To as_type(From value) {
  return __builtin_bit_cast(To, value);
}

// A 16-bit float: stored narrow, rounded to nearest even after every operation, computed in float32.
template <bool BRAIN>
struct small_float {
  uint16_t bits;

  small_float() = default;
  template <typename N, typename = std::enable_if_t<std::is_arithmetic_v<N>>>
  small_float(N value) : bits(narrow(static_cast<float>(value))) {}
  explicit small_float(small_float<!BRAIN> value) : small_float(static_cast<float>(value)) {}

  operator float() const {
    if constexpr (BRAIN) {
      return __builtin_bit_cast(float, uint32_t(bits) << 16);
    } else {
      return static_cast<float>(__builtin_bit_cast(_Float16, bits));
    }
  }

  static uint16_t narrow(float value) {
    if constexpr (BRAIN) {
      uint32_t u = __builtin_bit_cast(uint32_t, value);
      if ((u & 0x7fffffffu) > 0x7f800000u) {
        return uint16_t(u >> 16) | 0x40;
      }
      return uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
    } else {
      return __builtin_bit_cast(uint16_t, static_cast<_Float16>(value));
    }
  }
};

using half = small_float<false>;
using float16_t = half;
using bfloat = small_float<true>;
using bfloat16_t = bfloat;

#define SHIM_SMALL_OPERATOR(op)                                                            \
  template <bool B>                                                                        \
  inline small_float<B> operator op(small_float<B> a, small_float<B> b) {                  \
    return small_float<B>(float(a) op float(b));                                           \
  }                                                                                        \
  template <bool B, typename I, typename = std::enable_if_t<std::is_integral_v<I>>>        \
  inline small_float<B> operator op(small_float<B> a, I b) {                               \
    return small_float<B>(float(a) op float(b));                                           \
  }                                                                                        \
  template <bool B, typename V>                                                            \
  inline small_float<B>& operator op##=(small_float<B>& a, V b) {                          \
    a = small_float<B>(float(a) op float(b));                                              \
    return a;                                                                              \
  }
SHIM_SMALL_OPERATOR(+)
SHIM_SMALL_OPERATOR(-)
SHIM_SMALL_OPERATOR(*)
SHIM_SMALL_OPERATOR(/)
#undef SHIM_SMALL_OPERATOR

// Aligned to its whole size, as in Metal.
template <typename T, int N>
struct vec;
template <typename T>
struct alignas(sizeof(T) * 2) vec<T, 2> {
  T x, y;
  T operator[](int i) const { return (&x)[i]; }
  T& operator[](int i) { return (&x)[i]; }
};
template <typename T>
struct alignas(sizeof(T) * 4) vec<T, 3> {
  T x, y, z;
  T operator[](int i) const { return (&x)[i]; }
  T& operator[](int i) { return (&x)[i]; }
};
template <typename T>
struct alignas(sizeof(T) * 4) vec<T, 4> {
  T x, y, z, w;
  T operator[](int i) const { return (&x)[i]; }
  T& operator[](int i) { return (&x)[i]; }
};
using uint2 = vec<uint, 2>;
using uint3 = vec<uint, 3>;
using uint4 = vec<uint, 4>;
using int2 = vec<int, 2>;
using int4 = vec<int, 4>;
using ushort4 = vec<ushort, 4>;
using float2 = vec<float, 2>;
using float4 = vec<float, 4>;

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };

using shim_here = std::source_location;

inline void threadgroup_barrier(mem_flags flags, shim_here at = shim_here::current()) {
  shim_barrier(int(flags), at.line(), at.column());
}
inline void simdgroup_barrier(mem_flags flags, shim_here at = shim_here::current()) {
  shim_simdgroup_barrier(int(flags), at.line(), at.column());
}

enum shim_operation { SHIM_SUM, SHIM_MAX, SHIM_MIN, SHIM_OR, SHIM_AND, SHIM_SHUFFLE, SHIM_ANY, SHIM_ALL, SHIM_SCAN };

// Every lane's value, by lane; only the first shim_lanes() are there.
template <typename T>
inline const T* shim_all_lanes(shim_operation operation, T value, shim_here at) {
  static_assert(sizeof(T) <= 16);
  return reinterpret_cast<const T*>(shim_exchange(operation, &value, sizeof(T), at.line(), at.column()));
}

template <typename T, typename F>
inline T shim_reduce(shim_operation operation, T value, F combine, shim_here at) {
  const T* lanes = shim_all_lanes(operation, value, at);
  const unsigned char* order = shim_reduction_order();
  // A tree over an order that the harness may shuffle: Apple states none.
  T tree[SIMD_WIDTH];
  uint n = 0;
  for (uint i = 0; i < SIMD_WIDTH; i++) {
    if (order[i] < shim_lanes()) {
      tree[n++] = lanes[order[i]];
    }
  }
  for (; n > 1; n = (n + 1) / 2) {
    for (uint i = 0; i < n / 2; i++) {
      tree[i] = combine(tree[2 * i], tree[2 * i + 1]);
    }
    if (n % 2) {
      tree[n / 2] = tree[n - 1];
    }
  }
  return tree[0];
}

// A lane that is not there yields all bits set: NaN, or -1.
template <typename T>
inline T shim_pick(T value, uint lane, shim_here at) {
  const T* lanes = shim_all_lanes(SHIM_SHUFFLE, value, at);
  T picked;
  if (lane < shim_lanes()) {
    picked = lanes[lane];
  } else {
    for (size_t i = 0; i < sizeof(T); i++) {
      reinterpret_cast<unsigned char*>(&picked)[i] = 0xff;
    }
  }
  return picked;
}

namespace metal {

using ::mem_flags;
using ::simdgroup_barrier;
using ::threadgroup_barrier;
using ::vec;

template <typename T>
inline T simd_sum(T value, shim_here at = shim_here::current()) {
  return shim_reduce(SHIM_SUM, value, [](T a, T b) { return T(a + b); }, at);
}
template <typename T>
inline T simd_max(T value, shim_here at = shim_here::current()) {
  return shim_reduce(SHIM_MAX, value, [](T a, T b) { return a < b ? b : a; }, at);
}
template <typename T>
inline T simd_min(T value, shim_here at = shim_here::current()) {
  return shim_reduce(SHIM_MIN, value, [](T a, T b) { return b < a ? b : a; }, at);
}
template <typename T>
inline T simd_or(T value, shim_here at = shim_here::current()) {
  return shim_reduce(SHIM_OR, value, [](T a, T b) { return T(a | b); }, at);
}
template <typename T>
inline T simd_and(T value, shim_here at = shim_here::current()) {
  return shim_reduce(SHIM_AND, value, [](T a, T b) { return T(a & b); }, at);
}
inline bool simd_any(bool value, shim_here at = shim_here::current()) {
  return shim_reduce(SHIM_ANY, value, [](bool a, bool b) { return a || b; }, at);
}
inline bool simd_all(bool value, shim_here at = shim_here::current()) {
  return shim_reduce(SHIM_ALL, value, [](bool a, bool b) { return a && b; }, at);
}
template <typename T>
inline T simd_prefix_exclusive_sum(T value, shim_here at = shim_here::current()) {
  const T* lanes = shim_all_lanes(SHIM_SCAN, value, at);
  T sum = T(0);
  for (uint i = 0; i < shim_lane(); i++) {
    sum = T(sum + lanes[i]);
  }
  return sum;
}
template <typename T>
inline T simd_shuffle(T value, ushort lane, shim_here at = shim_here::current()) {
  return shim_pick(value, lane, at);
}
template <typename T>
inline T simd_broadcast(T value, ushort lane, shim_here at = shim_here::current()) {
  return shim_pick(value, lane, at);
}
template <typename T>
inline T simd_shuffle_xor(T value, ushort mask, shim_here at = shim_here::current()) {
  return shim_pick(value, shim_lane() ^ mask, at);
}
template <typename T>
inline T simd_shuffle_up(T value, ushort delta, shim_here at = shim_here::current()) {
  return shim_pick(value, shim_lane() - delta, at);
}
template <typename T>
inline T simd_shuffle_down(T value, ushort delta, shim_here at = shim_here::current()) {
  return shim_pick(value, shim_lane() + delta, at);
}

template <typename T>
inline T max(T a, T b) {
  return a < b ? b : a;
}
template <typename T>
inline T min(T a, T b) {
  return b < a ? b : a;
}
template <typename T>
inline T clamp(T value, T low, T high) {
  return min(max(value, low), high);
}
template <typename T>
inline T abs(T value) {
  return value < 0 ? -value : value;
}
inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

inline float exp(float x) { return __builtin_expf(x); }
inline float log(float x) { return __builtin_logf(x); }
inline float sqrt(float x) { return __builtin_sqrtf(x); }
inline float rsqrt(float x) { return 1.0f / __builtin_sqrtf(x); }
namespace precise {
using metal::exp;
using metal::log;
using metal::rsqrt;
using metal::sqrt;
}  // namespace precise
namespace fast {
using metal::exp;
using metal::log;
}  // namespace fast

}  // namespace metal

using namespace metal;

// What one thread's attributes are; the order is the runtime's.
struct shim_attributes {
  uint3 thread_position_in_grid;
  uint3 thread_position_in_threadgroup;
  uint3 threadgroup_position_in_grid;
  uint3 threads_per_grid;
  uint3 threads_per_threadgroup;
  uint3 threadgroups_per_grid;
  uint thread_index_in_threadgroup;
  uint thread_index_in_simdgroup;
  uint simdgroup_index_in_threadgroup;
  uint simdgroups_per_threadgroup;
  uint threads_per_simdgroup;
};

template <typename T>
inline T& shim_threadgroup(int slot) {
  return *static_cast<T*>(shim_shared(slot, sizeof(T)));
}

// Address spaces are checked by another compiler, see metal_spaces.h.
#define device
#define constant
#define threadgroup
#define thread
