// Multiplies by weights of 4 and 8 bits on CPUs with AVX2, for `int4pack.py`, which describes the layout of 4-bit codes,
// and `head.py`.
//
// Each group of inputs of a token is rounded to integers of 16 bits with a scale of its own. Products of such integers
// and codes are summed up exactly, in int32; sums of groups are multiplied by the scales and added in float32.
// 4-bit weights are unpacked once for all tokens, 32 columns of one group at a time.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <immintrin.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace {

constexpr int64_t kColumns = 32;  // unpacked at a time: those of 16 bytes
constexpr int64_t kMostGroup = 128;
constexpr int64_t kTokens = 3;  // multiplied at a time: their sums fit into registers
constexpr int64_t kHeadGroup = 64;  // inputs that share a scale, for codes of 8 bits
constexpr int64_t kTile = 96;  // tokens whose integers stay in the cache of a processor

struct Rounded {  // the inputs of a product
  std::vector<int16_t> values;  // [tokens, in]
  std::vector<float> scales;  // [tokens, groups]
  std::vector<int32_t> sums;  // [tokens, groups], of the values
};

template <typename T>
void round_group(const T* x, int64_t size, int16_t* values, float* scale, int32_t* sum) {
  float held[kMostGroup];
  float largest = 0;
  bool finite = true;
  for (int64_t i = 0; i < size; i++) {
    held[i] = static_cast<float>(x[i]);
    largest = std::max(largest, std::fabs(held[i]));
    finite &= std::isfinite(held[i]);
  }
  finite &= std::isfinite(largest);
  const float factor = finite && largest > 1e-30f ? 32767.0f / largest : 0.0f;  // else it would not be finite
  int32_t total = 0;
  for (int64_t i = 0; i < size; i++) {
    const int32_t value = static_cast<int32_t>(std::nearbyint(finite ? held[i] * factor : 0.0f));
    values[i] = static_cast<int16_t>(value);
    total += value;
  }
  *scale = finite ? largest / 32767.0f : NAN;
  *sum = total;
}

inline __m256i add_products(__m256i sum, __m256i x, __m256i weights) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
  return _mm256_dpwssd_epi32(sum, x, weights);
#else
  return _mm256_add_epi32(sum, _mm256_madd_epi16(x, weights));
#endif
}

// Pairs of inputs of 32 columns, 8 columns in each vector, unpacked from the codes of two inputs.
struct Pairs {
  __m256i columns[4];
};

inline Pairs unpack(const uint8_t* codes, int64_t stride) {
  const __m128i low = _mm_set1_epi8(15);
  const __m128i one = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
  const __m128i two = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + stride));
  const __m128i left = _mm_unpacklo_epi8(one, two), right = _mm_unpackhi_epi8(one, two);
  return {{_mm256_cvtepu8_epi16(_mm_and_si128(left, low)), _mm256_cvtepu8_epi16(_mm_and_si128(right, low)),
           _mm256_cvtepu8_epi16(_mm_and_si128(_mm_srli_epi16(left, 4), low)),
           _mm256_cvtepu8_epi16(_mm_and_si128(_mm_srli_epi16(right, 4), low))}};
}

struct Codes {  // as they are: for one token
  const uint8_t* first;
  int64_t stride;
  Pairs pairs(int64_t i) const { return unpack(first + i * stride, stride); }
};

struct Unpacked {  // for several tokens
  const int16_t* first;
  Pairs pairs(int64_t i) const {
    Pairs found;
    for (int c = 0; c < 4; c++) {
      found.columns[c] = _mm256_load_si256(reinterpret_cast<const __m256i*>(first + kColumns * i + 16 * c));
    }
    return found;
  }
};

inline void unpack_all(const Codes& codes, int64_t size, int16_t* out) {
  for (int64_t i = 0; i < size; i += 2) {
    const Pairs found = codes.pairs(i);
    for (int c = 0; c < 4; c++) {
      _mm256_store_si256(reinterpret_cast<__m256i*>(out + kColumns * i + 16 * c), found.columns[c]);
    }
  }
}

// Add the products of some tokens and one group of 32 columns to `out`, [tokens, 32].
template <int64_t tokens, typename Weights>
inline void add_group(
    const int16_t* x, int64_t x_stride, const float* x_scales, const int32_t* x_sums, int64_t groups,
    const Weights& weights, int64_t size, const __m256* scales, const __m256i* zeros, float* out) {
  __m256i sums[tokens][4];
  for (int64_t t = 0; t < tokens; t++) {
    for (int c = 0; c < 4; c++) sums[t][c] = _mm256_setzero_si256();
  }
  for (int64_t i = 0; i < size; i += 2) {
    const Pairs held = weights.pairs(i);
    for (int64_t t = 0; t < tokens; t++) {
      int32_t both;
      __builtin_memcpy(&both, x + t * x_stride + i, sizeof(both));
      const __m256i pair = _mm256_set1_epi32(both);
      for (int c = 0; c < 4; c++) sums[t][c] = add_products(sums[t][c], pair, held.columns[c]);
    }
  }
  for (int64_t t = 0; t < tokens; t++) {
    const __m256 x_scale = _mm256_set1_ps(x_scales[t * groups]);
    const __m256i x_sum = _mm256_set1_epi32(x_sums[t * groups]);
    for (int c = 0; c < 4; c++) {
      const __m256i exact = _mm256_sub_epi32(sums[t][c], _mm256_mullo_epi32(zeros[c], x_sum));
      float* target = out + t * kColumns + 8 * c;
      const __m256 factor = _mm256_mul_ps(scales[c], x_scale);
      _mm256_storeu_ps(target, _mm256_fmadd_ps(_mm256_cvtepi32_ps(exact), factor, _mm256_loadu_ps(target)));
    }
  }
}

// Multiply some tokens by 32 columns: those of the low nibbles from `first` on, and those of the high ones from `second`.
void multiply(
    const Rounded& x, int64_t begin, int64_t end, int64_t in_features, int64_t out_features, const uint8_t* codes,
    int64_t stride, const int32_t* qzeros, const at::Half* scales, int64_t groups, int64_t first, int64_t second,
    float* out) {
  alignas(32) int16_t weights[kMostGroup * kColumns];
  const int64_t size = in_features / groups;
  const __m256i shifts = _mm256_setr_epi32(0, 16, 4, 20, 8, 24, 12, 28);
  std::fill(out, out + (end - begin) * kColumns, 0.0f);
  for (int64_t g = 0; g < groups; g++) {
    const Codes packed{codes + g * size * stride, stride};
    if (end - begin > 1) unpack_all(packed, size, weights);
    __m256 steps[4];
    __m256i zeros[4];
    for (int c = 0; c < 4; c++) {
      const int64_t column = (c < 2 ? first : second) + 8 * (c % 2);
      const auto* halves = reinterpret_cast<const __m128i*>(scales + g * out_features + column);
      _mm_prefetch(reinterpret_cast<const char*>(halves + 4), _MM_HINT_T0);  // of the columns behind these
      steps[c] = _mm256_cvtph_ps(_mm_loadu_si128(halves));
      const int32_t* words = qzeros + (g * out_features + column) / 8;
      _mm_prefetch(reinterpret_cast<const char*>(words + 4), _MM_HINT_T0);
      const __m256i word = _mm256_set1_epi32(*words);
      zeros[c] = _mm256_and_si256(_mm256_srlv_epi32(word, shifts), _mm256_set1_epi32(15));
    }
    int64_t t = begin;
    const auto add = [&](auto count, const auto& held) {
      constexpr int64_t tokens = decltype(count)::value;
      for (; t + tokens <= end; t += tokens) {
        add_group<tokens>(
            x.values.data() + t * in_features + g * size, in_features, x.scales.data() + t * groups + g,
            x.sums.data() + t * groups + g, groups, held, size, steps, zeros, out + (t - begin) * kColumns);
      }
    };
    if (end - begin == 1) {
      add(std::integral_constant<int64_t, 1>{}, packed);
    } else {
      add(std::integral_constant<int64_t, kTokens>{}, Unpacked{weights});
      add(std::integral_constant<int64_t, 1>{}, Unpacked{weights});
    }
  }
}

template <typename T>
Rounded round_all(const at::Tensor& x, int64_t groups) {
  const int64_t tokens = x.size(0), size = x.size(1) / groups;
  Rounded held;
  held.values.resize(x.numel());
  held.scales.resize(tokens * groups);
  held.sums.resize(tokens * groups);
  const T* given = x.const_data_ptr<T>();
  at::parallel_for(0, tokens, 8, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin * groups; i < end * groups; i++) {
      round_group(given + i * size, size, &held.values[i * size], &held.scales[i], &held.sums[i]);
    }
  });
  return held;
}

template <typename T>
void multiply_all(
    const at::Tensor& x, const at::Tensor& qweight, const at::Tensor& qzeros, const at::Tensor& scales, int64_t block,
    at::Tensor& out) {
  const int64_t tokens = x.size(0), in_features = x.size(1), out_features = qweight.size(0), groups = scales.size(0);
  const Rounded held = round_all<T>(x, groups);
  T* target = out.mutable_data_ptr<T>();
  const uint8_t* codes = qweight.const_data_ptr<uint8_t>();
  const int32_t* zeros = qzeros.const_data_ptr<int32_t>();
  const at::Half* steps = scales.const_data_ptr<at::Half>();
  const int64_t parts = block / kColumns;  // of 16 bytes, in a block of columns
  const int64_t tasks = out_features / kColumns;
  const int64_t least = std::max<int64_t>(1, (1 << 16) / (in_features * kColumns * tokens));
  at::parallel_for(0, tasks, least, [&](int64_t begin, int64_t end) {
    alignas(32) float sums[kTile * kColumns];
    for (int64_t start = 0; start < tokens; start += kTile) {
      const int64_t stop = std::min(start + kTile, tokens);
      for (int64_t task = begin; task < end; task++) {
        const int64_t from = task / parts * block, part = task % parts;
        const int64_t first = from + 16 * part, second = first + block / 2;
        multiply(held, start, stop, in_features, out_features, codes + from * in_features / 2 + 16 * part, block / 2,
                 zeros, steps, groups, first, second, sums);
        for (int64_t t = start; t < stop; t++) {
          const float* row = sums + (t - start) * kColumns;
          for (int64_t c = 0; c < 16; c++) {
            target[t * out_features + first + c] = static_cast<T>(row[c]);
            target[t * out_features + second + c] = static_cast<T>(row[16 + c]);
          }
        }
      }
    }
  });
}

at::Tensor int4pack_mm(
    const at::Tensor& x, const at::Tensor& qweight, const at::Tensor& qzeros, const at::Tensor& scales,
    int64_t block) {
  TORCH_CHECK(x.dim() == 2 && x.is_contiguous() && qweight.is_contiguous() && qzeros.is_contiguous() &&
                  scales.is_contiguous(), "int4pack_mm: tensors must be contiguous");
  TORCH_CHECK(block % kColumns == 0 && qweight.size(0) % block == 0 && 2 * qweight.size(1) == x.size(1) &&
                  scales.size(1) == qweight.size(0) && x.size(1) % scales.size(0) == 0 &&
                  x.size(1) / scales.size(0) <= kMostGroup, "int4pack_mm: sizes do not fit");
  at::Tensor out = at::empty({x.size(0), qweight.size(0)}, x.options());
  if (out.numel() == 0) return out;
  switch (x.scalar_type()) {
    case at::kFloat: multiply_all<float>(x, qweight, qzeros, scales, block, out); break;
    case at::kBFloat16: multiply_all<at::BFloat16>(x, qweight, qzeros, scales, block, out); break;
    case at::kHalf: multiply_all<at::Half>(x, qweight, qzeros, scales, block, out); break;
    default: TORCH_CHECK(false, "int4pack_mm: dtype ", x.scalar_type());
  }
  return out;
}

inline float sum_of(__m256 parts) {
  __m128 found = _mm_add_ps(_mm256_castps256_ps128(parts), _mm256_extractf128_ps(parts, 1));
  found = _mm_add_ps(found, _mm_movehl_ps(found, found));
  return _mm_cvtss_f32(_mm_add_ss(found, _mm_movehdup_ps(found)));
}

// Multiply one token by `kRows` rows of codes.
constexpr int64_t kRows = 4;

inline void multiply_rows(
    const int16_t* x, const float* x_scales, const int8_t* codes, int64_t in_features, float* out) {
  __m256 totals[kRows];
  for (int64_t r = 0; r < kRows; r++) totals[r] = _mm256_setzero_ps();
  for (int64_t start = 0; start < in_features; start += kHeadGroup) {
    const __m256 x_scale = _mm256_set1_ps(x_scales[start / kHeadGroup]);
    for (int64_t r = 0; r < kRows; r++) {
      __m256i sum = _mm256_setzero_si256();
      for (int64_t i = start; i < start + kHeadGroup; i += 16) {
        const auto* row = reinterpret_cast<const __m128i*>(codes + r * in_features + i);
        const __m256i given = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i));
        sum = add_products(sum, given, _mm256_cvtepi8_epi16(_mm_loadu_si128(row)));
      }
      totals[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), x_scale, totals[r]);
    }
  }
  for (int64_t r = 0; r < kRows; r++) out[r] = sum_of(totals[r]);
}

template <typename T>
void multiply_head(const at::Tensor& x, const at::Tensor& codes, const at::Tensor& scales, at::Tensor& out) {
  const int64_t tokens = x.size(0), in_features = x.size(1), out_features = codes.size(0);
  const int64_t groups = in_features / kHeadGroup;
  const Rounded held = round_all<T>(x, groups);
  T* target = out.mutable_data_ptr<T>();
  const int8_t* first = codes.const_data_ptr<int8_t>();
  const float* steps = scales.const_data_ptr<float>();
  const int64_t tasks = (out_features + kRows - 1) / kRows;
  at::parallel_for(0, tasks, 64, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; task++) {
      const int64_t row = std::max<int64_t>(0, std::min(task * kRows, out_features - kRows));  // the last ones overlap
      for (int64_t t = 0; t < tokens; t++) {
        float found[kRows];
        multiply_rows(&held.values[t * in_features], &held.scales[t * groups], first + row * in_features, in_features,
                      found);
        for (int64_t r = 0; r < kRows; r++) {
          target[t * out_features + row + r] = static_cast<T>(found[r] * steps[row + r]);
        }
      }
    }
  });
}

at::Tensor int8_mm(const at::Tensor& x, const at::Tensor& codes, const at::Tensor& scales) {
  TORCH_CHECK(x.dim() == 2 && x.is_contiguous() && codes.is_contiguous() && scales.is_contiguous(),
              "int8_mm: tensors must be contiguous");
  TORCH_CHECK(codes.size(1) == x.size(1) && x.size(1) % kHeadGroup == 0 && codes.size(0) >= kRows &&
                  scales.size(0) == codes.size(0), "int8_mm: sizes do not fit");
  at::Tensor out = at::empty({x.size(0), codes.size(0)}, x.options());
  if (out.numel() == 0) return out;
  switch (x.scalar_type()) {
    case at::kFloat: multiply_head<float>(x, codes, scales, out); break;
    case at::kBFloat16: multiply_head<at::BFloat16>(x, codes, scales, out); break;
    case at::kHalf: multiply_head<at::Half>(x, codes, scales, out); break;
    default: TORCH_CHECK(false, "int8_mm: dtype ", x.scalar_type());
  }
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(kvboost_hf, m) {
  m.def("int4pack_mm(Tensor x, Tensor qweight, Tensor qzeros, Tensor scales, int block) -> Tensor");
  m.def("int8_mm(Tensor x, Tensor codes, Tensor scales) -> Tensor");
}
TORCH_LIBRARY_IMPL(kvboost_hf, CPU, m) {
  m.impl("int4pack_mm", &int4pack_mm);
  m.impl("int8_mm", &int8_mm);
}
