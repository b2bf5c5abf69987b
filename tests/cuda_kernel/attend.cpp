#include "attend.cu"

void cpu::call() { attend(*cpu::arguments); }
