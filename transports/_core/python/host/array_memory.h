/* NumPy's arrays in memory that all ranks of the host have mapped: functions of the module. See
   array_memory.c. */
#ifndef PC_ARRAY_MEMORY_H
#define PC_ARRAY_MEMORY_H

#include "python/base/py.h"

PyObject *pc_hook_numpy(PyObject *module, PyObject *api);
PyObject *pc_open_arena(PyObject *module, PyObject *args);
PyObject *pc_share_arrays(PyObject *module, PyObject *nbytes);
PyObject *pc_share_next(PyObject *module, PyObject *whether);
PyObject *pc_retire_arrays(PyObject *module, PyObject *unused);
PyObject *pc_shared_use(PyObject *module, PyObject *unused);
PyObject *pc_is_shared(PyObject *module, PyObject *args);

#endif
