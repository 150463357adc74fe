/* A host's memory as Python sees it. */
#ifndef PC_HOST_TYPE_H
#define PC_HOST_TYPE_H

#include "python/base/py.h"

#include "host/host.h"

extern PyType_Spec pc_host_spec;

/* What a `MappedHost` has; NULL with an exception: it is none. The memory lives as long as the
   object. */
pc_host *pc_host_of(PyObject *object);

#endif
