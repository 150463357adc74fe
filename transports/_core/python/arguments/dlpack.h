/* DLPack 1.3's structs, and its table of functions by which libraries lend each other arrays
   without Python: https://dmlc.github.io/dlpack/latest/c_api.html */
#ifndef PC_DLPACK_H
#define PC_DLPACK_H

#include "reduce/reduce_kernels.h"

#include <stdint.h>

enum { DL_CPU = 1 };
enum { DL_INT, DL_UINT, DL_FLOAT, DL_BFLOAT = 4, DL_COMPLEX, DL_BOOL };

struct dl_tensor {
    void *data;
    int32_t device_type, device_id;
    int32_t ndim;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides; /* in elements; no strides: C-contiguous */
    uint64_t byte_offset;
};

struct dl_version {
    uint32_t major, minor;
};

struct dl_managed {
    struct dl_version version;
    void *context;
    void (*deleter)(struct dl_managed *self);
    uint64_t flags;
    struct dl_tensor tensor;
};

/* Functions return 0, or -1 with a Python exception. None waits for a device. */
struct dl_exchange {
    struct dl_version version;
    struct dl_exchange *older;
    int (*allocate)(struct dl_tensor *like, struct dl_managed **out, void *context,
                    void (*set_error)(void *context, const char *kind, const char *message));
    int (*lend)(void *object, struct dl_managed **out);
    int (*make)(struct dl_managed *tensor, void **object); /* takes it over */
    int (*describe)(void *object, struct dl_tensor *out); /* borrows; may be NULL */
    int (*stream)(int32_t device_type, int32_t device_id, void **out);
};

/* The code of pycoll/_dtypes.py; 0: it has none. */
static inline int dl_dtype(const struct dl_tensor *tensor) {
    static const unsigned char of_bits[][4] = {
        /* 8, 16, 32 and 64 bits */
        [DL_INT] = {PC_INT8, PC_INT16, PC_INT32, PC_INT64},
        [DL_UINT] = {PC_UINT8, PC_UINT16, PC_UINT32, PC_UINT64},
        [DL_FLOAT] = {0, PC_FLOAT16, PC_FLOAT32, PC_FLOAT64},
    };
    if (tensor->lanes != 1)
        return 0;
    int bits = tensor->bits;
    switch (tensor->code) {
    case DL_BFLOAT: return bits == 16 ? PC_BFLOAT16 : 0;
    case DL_COMPLEX: return bits == 64 ? PC_COMPLEX64 : bits == 128 ? PC_COMPLEX128 : 0;
    case DL_BOOL: return bits == 8 ? PC_BOOL : 0;
    case DL_INT:
    case DL_UINT:
    case DL_FLOAT:
        for (int index = 0; index < 4; index++)
            if (bits == 8 << index)
                return of_bits[tensor->code][index];
        return 0;
    default: return 0;
    }
}

static inline bool dl_is_contiguous(const struct dl_tensor *tensor) {
    int64_t stride = 1;
    for (int axis = tensor->ndim - 1; tensor->strides != NULL && axis >= 0; axis--) {
        if (tensor->shape[axis] != 1 && tensor->strides[axis] != stride)
            return false;
        stride *= tensor->shape[axis];
    }
    return true;
}

static inline void dl_set_dtype(struct dl_tensor *tensor, int dtype) {
    tensor->bits = (uint8_t)(8 * pc_itemsize(dtype));
    tensor->lanes = 1;
    if (dtype == PC_BOOL)
        tensor->code = DL_BOOL;
    else if (dtype == PC_BFLOAT16)
        tensor->code = DL_BFLOAT;
    else if (dtype >= PC_COMPLEX64)
        tensor->code = DL_COMPLEX;
    else
        tensor->code = dtype >= PC_FLOAT16 ? DL_FLOAT : dtype >= PC_UINT8 ? DL_UINT : DL_INT;
}

#endif
