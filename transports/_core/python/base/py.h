/* Python's limited API, for the files that Python calls. All others are plain C and build without
   it. */
#ifndef PC_PY_H
#define PC_PY_H

#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000
#endif
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#endif
