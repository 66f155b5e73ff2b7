// Conversions between float and the storage formats, equal to torch's `.to()` bit for bit except
// for the payload of a NaN. None of them depends on the flush-denormals mode of the thread.
#pragma once
#include "simd.h"
#if defined(__F16C__)
#include <immintrin.h>
#endif

enum Dtype : int64_t { FLOAT32 = 0, FLOAT16 = 1, BFLOAT16 = 2, E4M3FN = 3, E5M2 = 4 };

struct F32 { typedef float raw; typedef float query; };
struct F16 { typedef uint16_t raw; typedef float query; };
struct BF16 { typedef uint16_t raw; typedef float query; };
struct E4M3 { typedef uint8_t raw; typedef float query; };
struct E5M2F { typedef uint8_t raw; typedef float query; };

static inline vf as_float(vu x) { return reinterpret_cast<vf>(x); }
static inline uint32_t bits_of(float x) { uint32_t b; std::memcpy(&b, &x, 4); return b; }
static inline float float_of(uint32_t b) { float x; std::memcpy(&x, &b, 4); return x; }

template <class V, class T>
static inline V load_raw(const T* p) { V x; std::memcpy(&x, p, sizeof x); return x; }

// Half bits -> float. Where there is no instruction for it, subnormals are renormalised by an exact
// subtraction.
static inline vf half_to_float(vu16 bits) {
#if defined(__AVX512F__)
  return reinterpret_cast<vf>(_mm512_cvtph_ps(reinterpret_cast<__m256i>(bits)));
#elif defined(__F16C__) && defined(__AVX__)
  return reinterpret_cast<vf>(_mm256_cvtph_ps(reinterpret_cast<__m128i>(bits)));
#else
  const vu h = __builtin_convertvector(bits, vu);
  const vu body = (h & 0x7fffu) << 13, exponent = body & 0x0f800000u;
  const vu normal = body + (112u << 23);
  const vf tiny = as_float(normal + (1u << 23)) - float_of(113u << 23);
  const vu special = normal + (112u << 23);
  const vu magnitude = exponent == 0x0f800000u ? special
                       : exponent == 0u ? reinterpret_cast<vu>(tiny) : normal;
  return as_float(magnitude | ((h & 0x8000u) << 16));
#endif
}

template <class C>
static inline vf load_as_float(const typename C::raw* p);
template <>
inline vf load_as_float<F32>(const float* p) { return load(p); }
template <>
inline vf load_as_float<F16>(const uint16_t* p) { return half_to_float(load_raw<vu16>(p)); }
template <>
inline vf load_as_float<BF16>(const uint16_t* p) {
  return as_float(__builtin_convertvector(load_raw<vu16>(p), vu) << 16);
}
static inline vu16 load_bytes(const uint8_t* p) {
#if defined(__AVX512F__) && defined(__AVX2__)
  return reinterpret_cast<vu16>(_mm256_cvtepu8_epi16(load_raw<__m128i>(p)));
#elif defined(__AVX2__) && defined(__F16C__)
  return reinterpret_cast<vu16>(_mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i*)p)));
#else
  return __builtin_convertvector(load_raw<vu8>(p), vu16);
#endif
}
// E5M2 is the upper byte of a half.
template <>
inline vf load_as_float<E5M2F>(const uint8_t* p) { return half_to_float(load_bytes(p) << 8); }
// E4M3FN shifted into a half has an exponent 8 too small; 0x7f is the only NaN.
template <>
inline vf load_as_float<E4M3>(const uint8_t* p) {
  const vu16 b = load_bytes(p), body = b & 0x7f, sign = (b & 0x80) << 8;
  const vu16 nan = reinterpret_cast<vu16>(body == 0x7f) & 0x7e00;
  return half_to_float((body << 7) | nan | sign) * 256.0f;
}

// Like load_as_float, for the last n < VW elements; the other lanes are 0.
template <class C>
static inline vf load_tail(const typename C::raw* p, int n) {
  typename C::raw whole[VW] = {};
  std::memcpy(whole, p, n * sizeof(typename C::raw));
  return load_as_float<C>(whole);
}

template <class C>
static inline void row_to_float(const void* source, float* target, int n) {
  const typename C::raw* p = static_cast<const typename C::raw*>(source);
  int i = 0;
  for (; i + VW <= n; i += VW) store(target + i, load_as_float<C>(p + i));
  if (i == n) return;
  const vf tail = load_tail<C>(p + i, n - i);
  std::memcpy(target + i, &tail, (n - i) * sizeof(float));
}

static inline uint16_t float_to_half(float x) {
  const uint32_t bits = bits_of(x), sign = (bits >> 16) & 0x8000u, body = bits & 0x7fffffffu;
  const uint32_t tiny = bits_of(float_of(body) + 0.5f) - bits_of(0.5f);  // the add rounds
  const uint32_t normal = (body - (112u << 23) + 0xfffu + ((body >> 13) & 1u)) >> 13;
  uint32_t h = body < (113u << 23) ? tiny : normal;
  h = body >= (143u << 23) ? 0x7c00u : h;
  h = body > 0x7f800000u ? 0x7e00u : h;
  return static_cast<uint16_t>(h | sign);
}

static inline uint16_t float_to_bfloat16(float x) {
  const uint32_t bits = bits_of(x);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

// A whole vector, rounded.
template <class C>
static inline void store_from_float(typename C::raw* p, vf x);
template <>
inline void store_from_float<F32>(float* p, vf x) { store(p, x); }
template <>
inline void store_from_float<F16>(uint16_t* p, vf x) {
#if defined(__AVX512F__)
  const __m256i halves = _mm512_cvtps_ph(reinterpret_cast<__m512>(x), _MM_FROUND_TO_NEAREST_INT);
  std::memcpy(p, &halves, sizeof halves);
#elif defined(__F16C__) && defined(__AVX__)
  const __m128i halves = _mm256_cvtps_ph(reinterpret_cast<__m256>(x), _MM_FROUND_TO_NEAREST_INT);
  std::memcpy(p, &halves, sizeof halves);
#else
  for (int i = 0; i < VW; ++i) p[i] = float_to_half(x[i]);
#endif
}
template <>
inline void store_from_float<BF16>(uint16_t* p, vf x) {
  const vu bits = reinterpret_cast<vu>(x);
  const vu rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const vu halves = (bits & 0x7fffffffu) > 0x7f800000u ? rounded - rounded + 0x7fc0u : rounded;
  const vu16 stored = __builtin_convertvector(halves, vu16);
  std::memcpy(p, &stored, sizeof stored);
}

// E exponent bits' bias, M mantissa bits; `overflow` is what a magnitude >= `limit` bits becomes.
template <uint32_t BIAS, uint32_t M>
static inline uint8_t float_to_byte(float x, uint32_t limit, uint32_t overflow, uint32_t nan) {
  const uint32_t bits = bits_of(x), sign = (bits >> 24) & 0x80u, body = bits & 0x7fffffffu;
  // Adding a power of two whose last place is the format's smallest subnormal does the rounding.
  const float anchor = float_of((127 - BIAS + 23 - M + 1) << 23);
  const uint32_t tiny = bits_of(float_of(body) + anchor) - bits_of(anchor);
  const uint32_t half_ulp = (1u << (22 - M)) - 1u + ((body >> (23 - M)) & 1u);
  const uint32_t normal = (body - ((127 - BIAS) << 23) + half_ulp) >> (23 - M);
  uint32_t b = body < ((128 - BIAS) << 23) ? tiny : normal;
  b = body >= limit ? overflow : b;
  b = body > 0x7f800000u ? nan : b;
  return static_cast<uint8_t>(b | sign);
}

static inline void row_from_float(const float* source, void* target, int n, int64_t dtype) {
  if (dtype == FLOAT32) {
    std::memcpy(target, source, n * sizeof(float));
  } else if (dtype == FLOAT16) {
    uint16_t* p = static_cast<uint16_t*>(target);
    for (int i = 0; i < n; ++i) p[i] = float_to_half(source[i]);
  } else if (dtype == BFLOAT16) {
    uint16_t* p = static_cast<uint16_t*>(target);
    for (int i = 0; i < n; ++i) p[i] = float_to_bfloat16(source[i]);
  } else if (dtype == E4M3FN) {
    uint8_t* p = static_cast<uint8_t*>(target);
    // 464 and above would round past the largest finite value, 448.
    for (int i = 0; i < n; ++i) p[i] = float_to_byte<7, 3>(source[i], 0x43e80001u, 0x7fu, 0x7fu);
  } else {
    uint8_t* p = static_cast<uint8_t*>(target);
    for (int i = 0; i < n; ++i) p[i] = float_to_byte<15, 2>(source[i], 0x47800000u, 0x7cu, 0x7fu);
  }
}

static inline void any_row_to_float(const void* source, float* target, int n, int64_t dtype) {
  switch (dtype) {
    case FLOAT32: row_to_float<F32>(source, target, n); break;
    case FLOAT16: row_to_float<F16>(source, target, n); break;
    case BFLOAT16: row_to_float<BF16>(source, target, n); break;
    case E4M3FN: row_to_float<E4M3>(source, target, n); break;
    default: row_to_float<E5M2F>(source, target, n); break;
  }
}

static inline int64_t element_size(int64_t dtype) {
  return dtype == FLOAT32 ? 4 : dtype == FLOAT16 || dtype == BFLOAT16 ? 2 : 1;
}
