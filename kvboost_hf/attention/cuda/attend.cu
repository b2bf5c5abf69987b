// Attention, forward. A block takes ROWS rows of queries that share a K/V head, and one split of the columns they see.
//
// Row r is query r / groups of head r % groups. A warp keeps 16 rows: their queries, where registers suffice, and
// their sums of values. How a matrix is spread over a warp is not known, so logits pass through shared memory, where
// two lanes make weights of each row; and factors of rows return through it as a matrix, multiplied number by number.
//
// HEAD_DIM and VALUE_DIM are given by the compiler, multiples of 16.
#include <warp.cuh>

constexpr int COLUMNS = 32;  // of K/V at once; launch.py knows this, and the next three
constexpr bool QUERIES_IN_REGISTERS = HEAD_DIM + VALUE_DIM <= 256;
constexpr int WARPS = QUERIES_IN_REGISTERS ? 4 : 2;
constexpr int PAD = 8;  // halves behind each row, against bank conflicts

constexpr int ROWS = 16 * WARPS;
constexpr int THREADS = 32 * WARPS;
constexpr int KEY_STRIDE = HEAD_DIM + PAD;
constexpr int VALUE_STRIDE = VALUE_DIM + PAD;
constexpr int LOGIT_STRIDE = COLUMNS + PAD / 2;
constexpr int QUERY_SIZE = ROWS * KEY_STRIDE;
constexpr int KV_SIZE = COLUMNS * (KEY_STRIDE + VALUE_STRIDE);
constexpr int TILES_SIZE =  // queries that go on to registers do so through the place of K/V
    QUERIES_IN_REGISTERS ? (QUERY_SIZE > KV_SIZE ? QUERY_SIZE : KV_SIZE) : QUERY_SIZE + KV_SIZE;

constexpr float LOG2E = 1.4426950408889634f;

struct Strides {
    long long batch, head, row;
};

struct Arguments {  // as in launch.py; pointers may be null where `Visibility` has None
    const Half *query, *key, *value;
    const bool* keep;
    const int* columns;
    const long long* tree;
    const bool* mask;
    const float* sinks;
    Half* out;    // [batch, queries, heads, VALUE_DIM], or null
    float* wide;  // [splits, batch, queries, heads, VALUE_DIM], or null
    float* lse;   // [splits, batch, heads, queries]
    Strides query_strides, key_strides, value_strides, mask_strides;
    long long mask_stride, keep_strides[2], columns_strides[2], tree_strides[2];
    int queries, total, kv_heads, groups, causal, window;
    float scale, softcap;
};

// Whose a row is, and what it sees.
struct Row {
    int batch, head, query, own;

    __device__ bool sees(const Arguments& a, int column) const {
        const int place = column - (a.total - a.queries);
        if (a.tree && place >= 0) {
            const long long bits = a.tree[batch * a.tree_strides[0] + query * a.tree_strides[1]];
            if (!(bits >> place & 1)) return false;
        } else if ((a.causal && column > own) || (a.window && own - column >= a.window)) {
            return false;
        }
        if (a.keep && !a.keep[batch * a.keep_strides[0] + column * a.keep_strides[1]]) return false;
        if (!a.mask) return true;
        const Strides& s = a.mask_strides;
        return a.mask[batch * s.batch + head * s.head + query * s.row + column * a.mask_stride];
    }
};

__device__ int column_of(const Arguments& a, int batch, int query) {
    if (!a.columns) return a.total - a.queries + query;
    return a.columns[batch * a.columns_strides[0] + query * a.columns_strides[1]];
}

// Copy rows of K/V to shared memory, zeros for those at and behind `count`. Four reads are on their way at once.
template <int DIM>
__device__ void copy(Half* to, const Half* from, long long stride, int count) {
    constexpr int PARTS = DIM / 8;
    for (int start = threadIdx.x; start < COLUMNS * PARTS; start += 4 * THREADS) {
        uint4 numbers[4] = {};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int i = start + j * THREADS, row = i / PARTS;
            if (row < min(count, COLUMNS)) {
                numbers[j] = *reinterpret_cast<const uint4*>(from + row * stride + i % PARTS * 8);
            }
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int i = start + j * THREADS, row = i / PARTS;
            if (row < COLUMNS) *reinterpret_cast<uint4*>(to + row * (DIM + PAD) + i % PARTS * 8) = numbers[j];
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) attend(const Arguments a) {
    SHARED_MEMORY(shared);
    const int warp = threadIdx.x / 32, side = threadIdx.x % 2, line = threadIdx.x % 32 / 2;
    Half* const queries = reinterpret_cast<Half*>(shared);
    Half* const keys = queries + (QUERIES_IN_REGISTERS ? 0 : QUERY_SIZE);
    Half* const values = keys + COLUMNS * KEY_STRIDE;
    float* const logits = reinterpret_cast<float*>(queries + TILES_SIZE) + warp * 16 * LOGIT_STRIDE;
    float* const line_logits = logits + line * LOGIT_STRIDE;
    Half* const weights = reinterpret_cast<Half*>(logits);  // in the first half of the place of the logits
    Half* const line_weights = reinterpret_cast<Half*>(line_logits);
    float* const factors = logits + COLUMNS / 2;  // in the second
    float* const line_factors = line_logits + COLUMNS / 2 + side * 8;

    const int batch = blockIdx.y / a.kv_heads, kv_head = blockIdx.y % a.kv_heads;
    const int rows = a.queries * a.groups, heads = a.kv_heads * a.groups;
    const int first = (gridDim.x - 1 - blockIdx.x) * ROWS;  // those that see most begin first
    const int number = first + warp * 16 + line;
    const bool there = number < rows, warp_there = first + warp * 16 < rows;
    Row row = {batch, kv_head * a.groups + number % a.groups, number / a.groups, 0};
    if (there) row.own = column_of(a, batch, row.query);

    int lowest = a.total, highest = -1;
    for (int query = first / a.groups; query <= (min(first + ROWS, rows) - 1) / a.groups; ++query) {
        const int own = column_of(a, batch, query);
        lowest = min(lowest, own);
        highest = max(highest, own);
    }
    int begin = a.window ? max(0, lowest - a.window + 1) : 0;
    int end = a.causal ? min(a.total, highest + 1) : a.total;
    if (a.tree) {
        begin = min(begin, a.total - a.queries);
        end = a.total;
    }
    const int tiles = (max(end - begin, 0) + COLUMNS - 1) / COLUMNS;
    const int share = (tiles + gridDim.z - 1) / gridDim.z * COLUMNS;
    begin += blockIdx.z * share;
    end = min(end, begin + share);

    for (int i = threadIdx.x; i < ROWS * HEAD_DIM / 8; i += THREADS) {
        const int place = i / (HEAD_DIM / 8), offset = i % (HEAD_DIM / 8) * 8, r = first + place;
        const Strides& s = a.query_strides;
        const int head = kv_head * a.groups + r % a.groups;
        uint4 numbers = {0, 0, 0, 0};
        if (r < rows) {
            const Half* from = a.query + batch * s.batch + head * s.head + r / a.groups * s.row + offset;
            numbers = *reinterpret_cast<const uint4*>(from);
        }
        *reinterpret_cast<uint4*>(queries + place * KEY_STRIDE + offset) = numbers;
    }
    __syncthreads();
    const Half* const warp_queries = queries + warp * 16 * KEY_STRIDE;
    Halves query[QUERIES_IN_REGISTERS ? HEAD_DIM / 16 : 1];
    if (QUERIES_IN_REGISTERS) {
#pragma unroll
        for (int k = 0; k < HEAD_DIM / 16; ++k) load_left(query[k], warp_queries + 16 * k, KEY_STRIDE);
    }

    Floats sums[VALUE_DIM / 16] = {};
    float top = -INFINITY, weight = 0;  // the row's largest logit, times LOG2E, and this lane's part of the weights
    const Half* const key = a.key + batch * a.key_strides.batch + kv_head * a.key_strides.head;
    const Half* const value = a.value + batch * a.value_strides.batch + kv_head * a.value_strides.head;
    for (; begin < end; begin += COLUMNS) {
        __syncthreads();
        copy<HEAD_DIM>(keys, key + begin * a.key_strides.row, a.key_strides.row, end - begin);
        copy<VALUE_DIM>(values, value + begin * a.value_strides.row, a.value_strides.row, end - begin);
        __syncthreads();
        if (!warp_there) continue;

#pragma unroll
        for (int n = 0; n < COLUMNS; n += 16) {
            Floats products = {};
#pragma unroll
            for (int k = 0; k < HEAD_DIM / 16; ++k) {
                if (!QUERIES_IN_REGISTERS) load_left(query[0], warp_queries + 16 * k, KEY_STRIDE);
                Halves right;
                load_right_transposed(right, keys + n * KEY_STRIDE + 16 * k, KEY_STRIDE);
                multiply_transposed(products, query[QUERIES_IN_REGISTERS ? k : 0], right);
            }
            store(logits + n, products, LOGIT_STRIDE);
        }
        __syncwarp();

        const bool all_seen = !a.keep && !a.mask && begin + COLUMNS <= end &&
                              (!a.causal || begin + COLUMNS <= lowest + 1) &&
                              (!a.window || highest - begin < a.window) &&
                              (!a.tree || begin + COLUMNS <= a.total - a.queries);
        unsigned seen = 0xffffffff;  // bit j for column 2 * j + side
        if (!all_seen) {
            seen = 0;
#pragma unroll 1
            for (int column = begin + side; there && column < min(begin + COLUMNS, end); column += 2) {
                seen |= static_cast<unsigned>(row.sees(a, column)) << (column - begin) / 2;
            }
        }
        float logit[COLUMNS / 2], before = top;
#pragma unroll
        for (int j = 0; j < COLUMNS / 2; ++j) {
            float x = line_logits[2 * j + side] * a.scale;
            if (a.softcap) x = a.softcap * tanhf(x / a.softcap);
            logit[j] = seen >> j & 1 ? x * LOG2E : -INFINITY;
            top = fmaxf(top, logit[j]);
        }
        top = fmaxf(top, of_neighbour(top));
        __syncwarp();  // weights and factors replace the logits
        const float base = top == -INFINITY ? 0 : top;
        const float factor = exp2f(before - base);
        weight *= factor;
#pragma unroll
        for (int j = 0; j < COLUMNS / 2; ++j) {
            const float w = exp2f(logit[j] - base);
            weight += w;
            line_weights[2 * j + side] = to_half(w);
        }
#pragma unroll
        for (int j = 0; j < 8; ++j) line_factors[j] = factor;
        __syncwarp();

        Floats scaling;
        load(scaling, factors, LOGIT_STRIDE);
#pragma unroll
        for (int d = 0; d < VALUE_DIM / 16; ++d) {
#pragma unroll
            for (int j = 0; j < 8; ++j) sums[d].x[j] *= scaling.x[j];
        }
#pragma unroll
        for (int n = 0; n < COLUMNS; n += 16) {
            Halves left, right;
            load_left(left, weights + n, 2 * LOGIT_STRIDE);
#pragma unroll
            for (int d = 0; d < VALUE_DIM / 16; ++d) {
                load_right(right, values + n * VALUE_STRIDE + 16 * d, VALUE_STRIDE);
                multiply(sums[d], left, right);
            }
        }
    }
    if (!warp_there) return;

    weight += of_neighbour(weight);
    float lse = weight > 0 ? top + log2f(weight) : -INFINITY;
    if (a.sinks && blockIdx.z == 0 && there) {
        const float sink = a.sinks[row.head] * LOG2E, larger = fmaxf(lse, sink);
        if (larger != -INFINITY) lse = larger + log2f(exp2f(lse - larger) + exp2f(sink - larger));
    }
    const float factor = lse == -INFINITY ? 0 : exp2f(top - lse);
    const long long part = static_cast<long long>(blockIdx.z) * (gridDim.y / a.kv_heads) + batch;
    if (there && side == 0) a.lse[(part * heads + row.head) * a.queries + row.query] = lse / LOG2E;
    __syncwarp();
#pragma unroll
    for (int j = 0; j < 8; ++j) line_factors[j] = factor;
    __syncwarp();
    Floats scaling;
    load(scaling, factors, LOGIT_STRIDE);
    const long long out = ((part * a.queries + row.query) * heads + row.head) * VALUE_DIM + side * 8;
#pragma unroll
    for (int d = 0; d < VALUE_DIM / 16; ++d) {
#pragma unroll
        for (int j = 0; j < 8; ++j) sums[d].x[j] *= scaling.x[j];
        __syncwarp();
        store(logits, sums[d], LOGIT_STRIDE);
        __syncwarp();
        if (!there) continue;
        for (int j = 0; j < 8; ++j) {
            const float x = line_logits[side * 8 + j];
            if (a.wide) {
                a.wide[out + 16 * d + j] = x;
            } else {
                a.out[out + 16 * d + j] = to_half(x);
            }
        }
    }
}
