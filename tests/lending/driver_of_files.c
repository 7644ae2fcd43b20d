/* The calls of CUDA's driver that cuda_memory.Driver makes, with files for device memory: another process maps a file
 * by its name, as CUDA maps an allocation by its handle. Errors have CUDA's own numbers. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MOST = 1024, INVALID_VALUE = 1, INVALID_CONTEXT = 201, INVALID_HANDLE = 400 };

typedef struct { char path[64]; } Handle;
typedef struct { uint64_t base; size_t size; Handle handle; int mapped; } Memory;

static Memory memories[MOST];
static __thread void *current;
static char context;

static Memory *find(uint64_t address) {
    for (int i = 0; i < MOST; i++)
        if (memories[i].size && address >= memories[i].base && address < memories[i].base + memories[i].size)
            return &memories[i];
    return NULL;
}

static int map(const char *path, size_t size, int mapped, uint64_t *address) {
    int file = open(path, O_RDWR);
    struct stat found;
    if (file < 0 || fstat(file, &found) != 0) return INVALID_HANDLE;
    if (!size) size = found.st_size;
    void *base = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    for (int i = 0; i < MOST; i++)
        if (!memories[i].size) {
            memories[i] = (Memory){.base = (uint64_t)base, .size = size, .mapped = mapped};
            strcpy(memories[i].handle.path, path);
            *address = memories[i].base;
            return 0;
        }
    return INVALID_VALUE;
}

int cuInit(unsigned flags) { return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDevicePrimaryCtxRetain(void **given, int device) { *given = &context; return 0; }
int cuCtxPushCurrent_v2(void *given) { current = given; return 0; }
int cuCtxPopCurrent_v2(void **given) { *given = current; current = NULL; return 0; }

int cuGetErrorName(int status, const char **name) {
    *name = status == INVALID_HANDLE ? "CUDA_ERROR_INVALID_HANDLE" : "CUDA_ERROR_INVALID_VALUE";
    return 0;
}

int cuMemAlloc_v2(uint64_t *address, size_t size) {
    char path[64];
    snprintf(path, sizeof path, "%s/XXXXXX", getenv("DRIVER_OF_FILES"));
    int file = mkstemp(path);
    if (file < 0 || ftruncate(file, size) != 0) return INVALID_VALUE;
    close(file);
    return map(path, size, 0, address);
}

int cuMemGetAddressRange_v2(uint64_t *base, size_t *size, uint64_t address) {
    Memory *found = find(address);
    if (!current) return INVALID_CONTEXT;
    if (!found) return INVALID_VALUE;
    *base = found->base;
    *size = found->size;
    return 0;
}

int cuIpcGetMemHandle(Handle *handle, uint64_t address) {
    Memory *found = find(address);
    if (!current) return INVALID_CONTEXT;
    if (!found || found->mapped) return INVALID_VALUE;
    *handle = found->handle;
    return 0;
}

int cuIpcOpenMemHandle_v2(uint64_t *address, Handle handle, unsigned flags) {
    if (!current) return INVALID_CONTEXT;
    return flags == 1 ? map(handle.path, 0, 1, address) : INVALID_VALUE;
}

int cuIpcCloseMemHandle(uint64_t address) {
    Memory *found = find(address);
    if (!current) return INVALID_CONTEXT;
    if (!found || !found->mapped || found->base != address) return INVALID_VALUE;
    munmap((void *)found->base, found->size);
    memset(found, 0, sizeof *found);
    return 0;
}

int mappedAllocations(void) {
    int count = 0;
    for (int i = 0; i < MOST; i++) count += memories[i].mapped;
    return count;
}
