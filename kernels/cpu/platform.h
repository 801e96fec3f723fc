// What the kernels ask of the operating system; platform.cpp alone knows which one it is.
#pragma once

#include <cstddef>
#include <thread>
#include <vector>

namespace edgellm::platform {

// Whether an ARM processor has the dot products of 8-bit integers.
bool has_dot_products();

// Ask the system for the registers of AMX, for all threads of this process, and call `test`; false where the system
// refuses, or where a virtual machine names instructions that are illegal in it.
bool allow_tiles(bool (*test)());

// The cores that this process may run on.
int cores();

// The core of the calling thread, or -1 where threads cannot be kept off it.
int current_core();

// Let threads run on all cores of the process but one; false if it has no other.
bool keep_off(int core, const std::vector<std::thread::native_handle_type>& threads);

// Take the whole pages of memory that is mapped from a file out of the process; they are read again when they are used.
// Windows has no such call.
void give_back(const void* memory, size_t bytes);

// A number that a child of fork() does not share with its parent.
long process();

}  // namespace edgellm::platform
