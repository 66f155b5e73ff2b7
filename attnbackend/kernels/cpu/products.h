// How queries and keys, probabilities and values are multiplied: float by float, or, where the CPU has
// an instruction for it, bfloat16 pair by pair. Pairs need half the instructions and no conversion, and
// their products and sums are float all the same.
#pragma once
#include "convert.h"
#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

template <class C>
struct Products {
  typedef float element;  // of a staged query, key, value or probability
  typedef vf operand;
  static constexpr bool PAIRS = false;
  static constexpr int STEP = VW;         // cache elements in an operand
  static constexpr int SUM_LENGTH = 32;   // longest chain of additions of the wide kernel
  static inline operand from_cache(const typename C::raw* p) { return load_as_float<C>(p); }
  static inline operand from_tail(const typename C::raw* p, int n) { return load_tail<C>(p, n); }
  static inline operand get(const element* p) { return load(p); }
  static inline operand spread(element x) { return splat(x); }
  static inline vf add(vf acc, operand a, operand b) { return acc + a * b; }
  static inline vf rounded(vf x) { return x; }  // to the query's type, where pairs are multiplied
};

#if defined(__AVX512BF16__)
struct BF16Pairs { typedef uint16_t raw, query; };  // a bfloat16 cache under bfloat16 queries
template <>
inline vf load_as_float<BF16Pairs>(const uint16_t* p) { return load_as_float<BF16>(p); }

template <>
struct Products<BF16Pairs> {
  typedef uint32_t element;  // two bfloat16
  typedef vu operand;
  static constexpr bool PAIRS = true;
  static constexpr int STEP = 2 * VW;
  static constexpr int SUM_LENGTH = 1 << 30;  // chains are shorter than what bfloat16 loses
  static inline operand from_cache(const uint16_t* p) { return load_raw<vu>(p); }
  static inline operand from_tail(const uint16_t* p, int) { return load_raw<vu>(p); }  // there is none
  static inline operand get(const element* p) { return load_raw<vu>(p); }
  static inline operand spread(element x) { return x - vu{}; }
  static inline vf add(vf acc, operand a, operand b) {
    return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
  }
  static inline vf rounded(vf x) {
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)x)), 16);
  }
  // Lanes of two: `a` in the lower halves.
  static inline operand round(vf a, vf b) {
    const __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)a));
    const __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)b));
    return (vu)_mm512_or_si512(low, _mm512_slli_epi32(high, 16));
  }
  // Elements 0 .. 15 (PART 0) or 16 .. 31 (PART 1) of two rows, paired.
  template <int PART>
  static inline operand zip(vu a, vu b) {
    const __m256i low = _mm512_extracti64x4_epi64((__m512i)a, PART);
    const __m256i high = _mm512_extracti64x4_epi64((__m512i)b, PART);
    return (vu)_mm512_or_si512(_mm512_cvtepu16_epi32(low),
                               _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16));
  }
};
#endif
