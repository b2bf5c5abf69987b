// CUDA C++ on a CPU, as far as attend.cu needs it: each thread of a block is a fiber, which barriers switch.
//
// Where a number of a matrix is in a warp is scrambled, threads run in either order, and shared memory begins as NaN
// and ends in guards: code that relies on any of that, or lacks a barrier, gives other results, or an error.
#pragma once

#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#define __device__
#define __global__
#define __launch_bounds__(...)
#define SHARED_MEMORY(name) unsigned char* const name = cpu::shared

using Half = _Float16;
using std::max;
using std::min;

struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct Index {
    int x, y, z;
};
static Index threadIdx, blockIdx, gridDim;

namespace cpu {

enum State { READY, AT_WARP_BARRIER, AT_BLOCK_BARRIER, DONE };

struct Fiber {
    ucontext_t context;
    State state;
    std::vector<char> stack = std::vector<char>(1 << 16);
    float numbers[3][8];  // of this thread, for its warp to see
};

static ucontext_t scheduler;
static std::vector<Fiber> fibers;
static unsigned char* shared;

inline void wait(State at) {
    Fiber& own = fibers[threadIdx.x];
    own.state = at;
    swapcontext(&own.context, &scheduler);
}

// Where the j-th number of a thread is in a matrix.
inline int place(int j) { return (threadIdx.x % 32 * 8 + j) * 77 % 256; }

inline float& at(int matrix, int row, int column) {
    const int index = (row * 16 + column) * 133 % 256;  // 133 * 77 = 1 (mod 256)
    return fibers[threadIdx.x / 32 * 32 + index / 8].numbers[matrix][index % 8];
}

}  // namespace cpu

inline void __syncwarp() { cpu::wait(cpu::AT_WARP_BARRIER); }
inline void __syncthreads() { cpu::wait(cpu::AT_BLOCK_BARRIER); }

inline Half to_half(float x) { return static_cast<Half>(x); }

inline float of_neighbour(float x) {
    cpu::fibers[threadIdx.x].numbers[0][0] = x;
    __syncwarp();
    const float found = cpu::fibers[threadIdx.x ^ 1].numbers[0][0];
    __syncwarp();
    return found;
}

template <class Number>
struct Matrix {
    Number x[8];
};
using Halves = Matrix<Half>;
using Floats = Matrix<float>;

template <class Number>
void load(Matrix<Number>& m, const Number* from, int stride) {
    for (int j = 0; j < 8; ++j) m.x[j] = from[cpu::place(j) / 16 * stride + cpu::place(j) % 16];
}
inline void load_left(Halves& m, const Half* from, int stride) { load(m, from, stride); }
inline void load_right(Halves& m, const Half* from, int stride) { load(m, from, stride); }
inline void load_right_transposed(Halves& m, const Half* from, int stride) {
    for (int j = 0; j < 8; ++j) m.x[j] = from[cpu::place(j) % 16 * stride + cpu::place(j) / 16];
}

inline void store(float* to, const Floats& m, int stride) {
    for (int j = 0; j < 8; ++j) to[cpu::place(j) / 16 * stride + cpu::place(j) % 16] = m.x[j];
}

inline void multiply(Floats& sum, const Halves& left, const Halves& right) {
    auto& own = cpu::fibers[threadIdx.x].numbers;
    for (int j = 0; j < 8; ++j) own[1][j] = left.x[j], own[2][j] = right.x[j];
    __syncwarp();
    for (int j = 0; j < 8; ++j) {
        const int row = cpu::place(j) / 16, column = cpu::place(j) % 16;
        for (int k = 0; k < 16; ++k) sum.x[j] += cpu::at(1, row, k) * cpu::at(2, k, column);
    }
    __syncwarp();
}
inline void multiply_transposed(Floats& sum, const Halves& left, const Halves& right) { multiply(sum, left, right); }

struct Arguments;
extern "C" void attend(Arguments);

namespace cpu {

static const Arguments* arguments;
void call();  // attend(*arguments), where that is known

inline void begin() {
    call();
    wait(DONE);
}

// Run the threads of a block; false if some wait at a barrier that the others never reach.
inline bool run_block(int threads, bool backwards) {
    for (Fiber& fiber : fibers) {
        getcontext(&fiber.context);
        fiber.context.uc_stack = {fiber.stack.data(), 0, fiber.stack.size()};
        makecontext(&fiber.context, begin, 0);
        fiber.state = READY;
    }
    for (;;) {
        for (int i = 0; i < threads; ++i) {
            threadIdx.x = backwards ? threads - 1 - i : i;
            Fiber& fiber = fibers[threadIdx.x];
            if (fiber.state == READY) swapcontext(&scheduler, &fiber.context);
        }
        const auto all = [&](int first, int last, State state) {
            for (int i = first; i < last; ++i) {
                if (fibers[i].state != state) return false;
            }
            return true;
        };
        if (all(0, threads, DONE)) return true;
        bool released = false;
        const auto release = [&](int first, int last, State state) {
            if (!all(first, last, state)) return;
            for (int i = first; i < last; ++i) fibers[i].state = READY;
            released = true;
        };
        release(0, threads, AT_BLOCK_BARRIER);
        for (int first = 0; first < threads; first += 32) release(first, first + 32, AT_WARP_BARRIER);
        if (!released) return false;
    }
}

}  // namespace cpu

// 0, or 1 where threads wait for ever, or 2 where they write behind the shared memory.
extern "C" int run(const Arguments* arguments, const int* grid, int threads, int shared_bytes, bool backwards) {
    constexpr int guard = 4096;
    std::vector<unsigned char> memory(shared_bytes + guard + 128);
    cpu::shared = memory.data() + (128 - reinterpret_cast<uintptr_t>(memory.data()) % 128);
    cpu::arguments = arguments;
    cpu::fibers = std::vector<cpu::Fiber>(threads);
    gridDim = {grid[0], grid[1], grid[2]};
    for (blockIdx.z = 0; blockIdx.z < gridDim.z; ++blockIdx.z) {
        for (blockIdx.y = 0; blockIdx.y < gridDim.y; ++blockIdx.y) {
            for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) {
                memset(cpu::shared, 0xff, shared_bytes + guard);
                if (!cpu::run_block(threads, backwards)) return 1;
                for (int i = 0; i < guard; ++i) {
                    if (cpu::shared[shared_bytes + i] != 0xff) return 2;
                }
            }
        }
    }
    return 0;
}
