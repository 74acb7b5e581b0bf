// Calls kernels of a library on memory that a file holds, for emulated.py: LIBRARY FILE ADDRESS; without a file, prints linattn_isa().
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <utility>

namespace {

struct Header {  // what emulated.py writes first
    char name[128];
    int64_t integers[80];
    double doubles[4];
};

// Integers and doubles go in registers and places of their own, so that one signature serves all: who takes fewer looks at no more.
template <size_t... I>
void call(void* kernel, const Header& of, std::index_sequence<I...>) {
    using Kernel = void (*)(decltype(int64_t(I))..., double, double, double, double);
    reinterpret_cast<Kernel>(kernel)(of.integers[I]..., of.doubles[0], of.doubles[1], of.doubles[2], of.doubles[3]);
}

int failed(const char* what) {
    fprintf(stderr, "%s\n", what);
    return 1;
}

}  // namespace

int main(int count, char** arguments) {
    void* library = dlopen(arguments[1], RTLD_NOW);
    if (!library) return failed(dlerror());
    if (count == 2) {
        const auto isa = reinterpret_cast<int64_t (*)()>(dlsym(library, "linattn_isa"));
        return printf("%d\n", int(isa())) < 0;
    }
    const int file = open(arguments[2], O_RDWR);
    struct stat of;
    if (file < 0 || fstat(file, &of)) return failed("there is no such file");
    void* wanted = reinterpret_cast<void*>(strtoull(arguments[3], nullptr, 0));
    void* memory = mmap(wanted, of.st_size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0);
    if (memory != wanted) return failed("there is no room at that address");
    const Header& header = *static_cast<Header*>(memory);
    void* kernel = dlsym(library, header.name);
    if (!kernel) return failed(dlerror());
    call(kernel, header, std::make_index_sequence<80>());
    return 0;
}
