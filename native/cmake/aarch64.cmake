# Builds for 64-bit ARM on another processor: cmake -S native -B build/aarch64 --toolchain cmake/aarch64.cmake
# Debian's g++-aarch64-linux-gnu compiles it, and qemu-user-static runs what comes out, ctest included.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
# All in one file: then the machine needs no libraries of the other processor's.
set(CMAKE_EXE_LINKER_FLAGS_INIT -static)
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64-static)
