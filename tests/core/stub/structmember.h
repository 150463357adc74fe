#include <Python.h>

typedef struct {
    const char *name;
    int type;
    Py_ssize_t offset;
    int flags;
    const char *doc;
} PyMemberDef;
enum { T_INT = 1, T_BOOL = 14 };
