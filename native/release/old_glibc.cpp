// Lets wheels that are built beside a newer glibc load beside glibc 2.28. Linked with QUIRE_RELEASE=ON only.
//
// The linker binds to the newest version of a symbol. Here each that is newer than 2.28, and is used by Quire,
// libstdc++ or libgcc, is defined for this module alone: from the symbol's first version, which every glibc keeps, or
// in a few lines. auditwheel finds those that a newer compiler adds.
#include <elf.h>
#include <link.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <csignal>
#include <cstddef>
#include <cstdint>

#if defined(__x86_64__)
#define FIRST_VERSION "GLIBC_2.2.5"
#elif defined(__aarch64__)
#define FIRST_VERSION "GLIBC_2.17"
#else
#error "QUIRE_RELEASE: name the first version of glibc for this processor"
#endif

#define HIDDEN extern "C" __attribute__((visibility("hidden")))

// Defines `name` as its first version.
#define TAKE_FIRST_VERSION(result, name, parameters, arguments) \
  extern "C" result first_##name parameters;                    \
  asm(".symver first_" #name ", " #name "@" FIRST_VERSION);     \
  HIDDEN result own_##name parameters asm(#name);               \
  result own_##name parameters { return first_##name arguments; }

using Thread = unsigned long;

TAKE_FIRST_VERSION(double, log, (double x), (x))
TAKE_FIRST_VERSION(double, log2, (double x), (x))
TAKE_FIRST_VERSION(int, pthread_create,
                   (Thread * thread, const void* attributes, void* (*start)(void*), void* argument),
                   (thread, attributes, start, argument))
TAKE_FIRST_VERSION(int, pthread_detach, (Thread thread), (thread))
TAKE_FIRST_VERSION(int, pthread_join, (Thread thread, void** result), (thread, result))
TAKE_FIRST_VERSION(int, pthread_key_create, (unsigned* key, void (*destroy)(void*)), (key, destroy))
TAKE_FIRST_VERSION(int, __pthread_key_create, (unsigned* key, void (*destroy)(void*)), (key, destroy))
TAKE_FIRST_VERSION(int, pthread_once, (int* once, void (*run)()), (once, run))
TAKE_FIRST_VERSION(int, pthread_sigmask, (int how, const sigset_t* set, sigset_t* old), (how, set, old))

// libstdc++ asks it whether a count may be changed without a lock: never.
HIDDEN char own_single_threaded asm("__libc_single_threaded");
char own_single_threaded = 0;

HIDDEN int own_fstat64(int file, void* status) asm("fstat64");
int own_fstat64(int file, void* status) { return static_cast<int>(syscall(SYS_fstat, file, status)); }

// std::random_device reads it, which Quire does not use.
HIDDEN uint32_t own_arc4random() asm("arc4random");
uint32_t own_arc4random() {
  uint32_t bits = 0;
  while (getrandom(&bits, sizeof bits, 0) != sizeof bits) {
  }
  return bits;
}

// What libgcc reads of glibc's struct dl_find_object when an exception is thrown.
struct FoundObject {
  unsigned long long flags;
  void *map_begin, *map_end;
  void* link_map;
  void* eh_frame;
};
struct Search {
  uintptr_t address;
  FoundObject* found;
};

static int visit_object(dl_phdr_info* object, size_t, void* data) {
  const auto* search = static_cast<Search*>(data);
  const ElfW(Phdr)* frames = nullptr;
  bool is_inside = false;
  for (int i = 0; i < object->dlpi_phnum; ++i) {
    const ElfW(Phdr) & part = object->dlpi_phdr[i];
    const uintptr_t begin = object->dlpi_addr + part.p_vaddr;
    if (part.p_type == PT_GNU_EH_FRAME) frames = &part;
    if (part.p_type != PT_LOAD || search->address < begin || search->address - begin >= part.p_memsz) continue;
    is_inside = true;
    search->found->map_begin = reinterpret_cast<void*>(begin);
    search->found->map_end = reinterpret_cast<void*>(begin + part.p_memsz);
  }
  if (!is_inside || frames == nullptr) return 0;
  search->found->eh_frame = reinterpret_cast<void*>(object->dlpi_addr + frames->p_vaddr);
  return 1;
}

HIDDEN int own_find_object(void* address, FoundObject* found) asm("_dl_find_object");
int own_find_object(void* address, FoundObject* found) {
  Search search{reinterpret_cast<uintptr_t>(address), found};
  return dl_iterate_phdr(visit_object, &search) == 1 ? 0 : -1;
}
