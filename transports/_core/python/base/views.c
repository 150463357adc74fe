#include "views.h"

#include <stdlib.h>

static struct pc_views *views_of(Py_ssize_t most) {
    struct pc_views *views = malloc(sizeof *views + (size_t)most * sizeof(Py_buffer));
    if (views == NULL)
        return (struct pc_views *)PyErr_NoMemory();
    views->count = 0;
    views->nbytes = 0;
    views->object = NULL;
    return views;
}

void pc_views_release(struct pc_views *views) {
    if (views == NULL)
        return;
    for (Py_ssize_t index = 0; index < views->count; index++)
        PyBuffer_Release(&views->views[index]);
    Py_XDECREF(views->object);
    free(views);
}

static int add(struct pc_views *views, PyObject *object, int flags) {
    Py_buffer *view = &views->views[views->count];
    if (PyObject_GetBuffer(object, view, flags) < 0)
        return -1;
    views->count++;
    views->nbytes += (size_t)view->len;
    return 0;
}

struct pc_views *pc_view_into(PyObject *into, Py_ssize_t nbytes) {
    struct pc_views *views = views_of(1);
    if (views == NULL)
        return NULL;
    if (add(views, into, PyBUF_WRITABLE) < 0)
        goto failed;
    if (views->views[0].len < nbytes) {
        PyErr_SetString(PyExc_ValueError, "there is not enough room for the payload");
        goto failed;
    }
    return views;
failed:
    pc_views_release(views);
    return NULL;
}

struct pc_views *pc_view_of(PyObject *object) {
    struct pc_views *views = views_of(1);
    if (views == NULL || add(views, object, PyBUF_SIMPLE) == 0)
        return views;
    pc_views_release(views);
    return NULL;
}

struct pc_views *pc_view_parts(PyObject *parts) {
    Py_ssize_t count = PySequence_Size(parts);
    struct pc_views *views = count >= 0 ? views_of(count) : NULL;
    for (Py_ssize_t index = 0; views != NULL && index < count; index++) {
        PyObject *part = PySequence_GetItem(parts, index);
        if (part == NULL || add(views, part, PyBUF_SIMPLE) < 0) {
            pc_views_release(views);
            views = NULL;
        }
        Py_XDECREF(part);
    }
    return views;
}
