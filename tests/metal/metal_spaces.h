// Metal's address spaces and types for clang's -fsyntax-only: a pointer into one space is no pointer into another, and
// constants stay constant. Nothing here runs.
#pragma once

#define device __attribute__((address_space(1)))
#define constant __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))
#define thread
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")

using uint = unsigned int;
using ushort = unsigned short;
using uchar = unsigned char;
using ulong = unsigned long;
using size_t = decltype(sizeof(0));
using int8_t = signed char;
using uint8_t = unsigned char;
using int16_t = short;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long;
using uint64_t = unsigned long;
using half = _Float16;
using float16_t = _Float16;
using bfloat = __bf16;
using bfloat16_t = __bf16;

namespace metal {

template <typename T, int N>
using vec = T __attribute__((ext_vector_type(N)));

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);

template <typename To, typename From>
To as_type(From value);

#define SPACES_UNARY(name) \
  template <typename T>    \
  T name(T);
SPACES_UNARY(simd_sum)
SPACES_UNARY(simd_max)
SPACES_UNARY(simd_min)
SPACES_UNARY(simd_or)
SPACES_UNARY(simd_and)
SPACES_UNARY(simd_prefix_exclusive_sum)
SPACES_UNARY(abs)
#define SPACES_SHUFFLE(name) \
  template <typename T>      \
  T name(T, ushort);
SPACES_SHUFFLE(simd_shuffle)
SPACES_SHUFFLE(simd_broadcast)
SPACES_SHUFFLE(simd_shuffle_xor)
SPACES_SHUFFLE(simd_shuffle_up)
SPACES_SHUFFLE(simd_shuffle_down)
bool simd_any(bool);
bool simd_all(bool);
template <typename T>
T max(T, T);
template <typename T>
T min(T, T);
template <typename T>
T clamp(T, T, T);
float fma(float, float, float);
float exp(float);
float log(float);
float sqrt(float);
float rsqrt(float);
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

using uint2 = vec<uint, 2>;
using uint3 = vec<uint, 3>;
using uint4 = vec<uint, 4>;
using int2 = vec<int, 2>;
using int4 = vec<int, 4>;
using ushort4 = vec<ushort, 4>;
using float2 = vec<float, 2>;
using float4 = vec<float, 4>;
