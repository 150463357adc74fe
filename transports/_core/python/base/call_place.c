/* Where in a program a call was made. */
#include "py.h"

#include "call_place.h"

#include <stdbool.h>
#include <string.h>

/* Of places that have called before: the code is kept, so that its address is no other code's. */
struct known_place {
    PyObject *code;
    int line;
    bool is_program; /* in no module of pycoll or PyTorch, as in NOT_THE_PROGRAM of task.py */
    size_t nbytes;
    char text[PC_MOST_PLACE_NBYTES];
};

static struct known_place known_places[64];

static bool is_program(PyFrameObject *frame) {
    PyObject *globals = PyObject_GetAttrString((PyObject *)frame, "f_globals");
    PyObject *name = globals != NULL ? PyMapping_GetItemString(globals, "__name__") : NULL;
    const char *text =
        name != NULL && PyUnicode_Check(name) ? PyUnicode_AsUTF8AndSize(name, NULL) : NULL;
    bool is_program =
        text == NULL || (strncmp(text, "pycoll.", 7) != 0 && strncmp(text, "torch.", 6) != 0);
    PyErr_Clear();
    Py_XDECREF(globals);
    Py_XDECREF(name);
    return is_program;
}

/* Know the file's name and the line. */
static void know_place(struct known_place *known, PyFrameObject *frame, PyObject *code, int line) {
    PyObject *name = PyObject_GetAttrString(code, "co_filename"), *before = known->code;
    const char *text =
        name != NULL && PyUnicode_Check(name) ? PyUnicode_AsUTF8AndSize(name, NULL) : NULL;
    PyErr_Clear();
    const char *slash = text != NULL ? strrchr(text, '/') : NULL;
    PyOS_snprintf(known->text, sizeof known->text, "%s:%d",
                  slash != NULL  ? slash + 1
                  : text != NULL ? text
                                 : "?",
                  line);
    known->nbytes = strlen(known->text);
    known->is_program = is_program(frame);
    known->line = line;
    known->code = Py_NewRef(code);
    Py_XDECREF(name);
    Py_XDECREF(before);
}

/* The frame that called this one (new reference); NULL: none. */
static PyFrameObject *caller_of(PyFrameObject *frame) {
    PyObject *outer = PyObject_GetAttrString((PyObject *)frame, "f_back");
    PyErr_Clear();
    if (outer == Py_None)
        Py_CLEAR(outer);
    return (PyFrameObject *)outer;
}

/* Where this thread's calls were made, if it makes them for another. */
static _Thread_local char made_at[PC_MOST_PLACE_NBYTES];
static _Thread_local size_t made_at_nbytes;

/* set_made_at(text): this thread's calls were made there; "": where it makes them */
PyObject *pc_set_made_at(PyObject *Py_UNUSED(module), PyObject *text) {
    Py_ssize_t nbytes;
    const char *place = PyUnicode_AsUTF8AndSize(text, &nbytes);
    if (place == NULL)
        return NULL;
    made_at_nbytes = nbytes < PC_MOST_PLACE_NBYTES ? (size_t)nbytes : PC_MOST_PLACE_NBYTES;
    memcpy(made_at, place, made_at_nbytes);
    Py_RETURN_NONE;
}

size_t pc_call_place(char to[PC_MOST_PLACE_NBYTES]) {
    if (made_at_nbytes > 0) {
        memcpy(to, made_at, made_at_nbytes);
        return made_at_nbytes;
    }
    PyFrameObject *frame = (PyFrameObject *)Py_XNewRef((PyObject *)PyEval_GetFrame());
    while (frame != NULL) {
        PyObject *code = (PyObject *)PyFrame_GetCode(frame);
        int line = PyFrame_GetLineNumber(frame);
        struct known_place *known = &known_places[((uintptr_t)code / 64 + (size_t)line) % 64];
        if (known->code != code || known->line != line)
            know_place(known, frame, code, line);
        Py_DECREF(code);
        PyFrameObject *outer = known->is_program ? NULL : caller_of(frame);
        Py_DECREF((PyObject *)frame);
        if (known->is_program) {
            memcpy(to, known->text, known->nbytes);
            return known->nbytes;
        }
        frame = outer;
    }
    to[0] = '?';
    return 1;
}
