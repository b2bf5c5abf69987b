// What a warp does as one: 16 x 16 matrices on tensor cores, and barriers. In PTX, for which NVRTC needs no headers.
#pragma once

#define INFINITY __int_as_float(0x7f800000)
#define SHARED_MEMORY(name) extern __shared__ __align__(128) unsigned char name[]

struct Half {
    unsigned short bits;
};

// 16 x 16 numbers, spread over the lanes of a warp in a way that only the hardware knows.
struct Halves {
    unsigned x[8];
};
struct Floats {
    float x[8];
};

#define EIGHT(type, m) \
    type(m.x[0]), type(m.x[1]), type(m.x[2]), type(m.x[3]), type(m.x[4]), type(m.x[5]), type(m.x[6]), type(m.x[7])

__device__ __forceinline__ unsigned shared_address(const void* place) {
    return static_cast<unsigned>(__cvta_generic_to_shared(place));
}

#define DEFINE_LOAD(name, Matrix, Number, type, form)                                                       \
    __device__ __forceinline__ void name(Matrix& m, const Number* from, int stride) {                       \
        asm volatile("wmma.load." form " {%0, %1, %2, %3, %4, %5, %6, %7}, [%8], %9;"                       \
                     : EIGHT(type, m)                                                                       \
                     : "r"(shared_address(from)), "r"(stride)                                               \
                     : "memory");                                                                           \
    }
DEFINE_LOAD(load_left, Halves, Half, "=r", "a.sync.aligned.row.m16n16k16.shared.f16")
DEFINE_LOAD(load_right, Halves, Half, "=r", "b.sync.aligned.row.m16n16k16.shared.f16")
DEFINE_LOAD(load_right_transposed, Halves, Half, "=r", "b.sync.aligned.col.m16n16k16.shared.f16")
DEFINE_LOAD(load, Floats, float, "=f", "c.sync.aligned.row.m16n16k16.shared.f32")

// sum += left * right; which of them depends on how `right` was loaded.
#define DEFINE_MULTIPLY(name, form)                                                                            \
    __device__ __forceinline__ void name(Floats& sum, const Halves& left, const Halves& right) {               \
        asm volatile("wmma.mma.sync.aligned." form ".m16n16k16.f32.f32 {%0, %1, %2, %3, %4, %5, %6, %7}, "     \
                     "{%8, %9, %10, %11, %12, %13, %14, %15}, {%16, %17, %18, %19, %20, %21, %22, %23}, "      \
                     "{%0, %1, %2, %3, %4, %5, %6, %7};"                                                       \
                     : EIGHT("+f", sum)                                                                        \
                     : EIGHT("r", left), EIGHT("r", right));                                                   \
    }
DEFINE_MULTIPLY(multiply, "row.row")
DEFINE_MULTIPLY(multiply_transposed, "row.col")

__device__ __forceinline__ void store(float* to, const Floats& m, int stride) {
    asm volatile("wmma.store.d.sync.aligned.row.m16n16k16.shared.f32 [%0], {%2, %3, %4, %5, %6, %7, %8, %9}, %1;"
                 :
                 : "r"(shared_address(to)), "r"(stride), EIGHT("f", m)
                 : "memory");
}

__device__ __forceinline__ Half to_half(float x) {
    Half half;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half.bits) : "f"(x));
    return half;
}

__device__ __forceinline__ float of_neighbour(float x) { return __shfl_xor_sync(0xffffffff, x, 1); }
