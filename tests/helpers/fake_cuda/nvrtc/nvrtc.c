/* NVRTC without a GPU: gcc compiles a kernel's text, which is C too, for the processor. What comes
 * out is a shared library, which the fake driver loads as a module (../kernels.c). */
#define _GNU_SOURCE
#include <fcntl.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))

enum { OK = 0, OUT_OF_MEMORY = 1, INVALID_INPUT = 3, COMPILATION = 6 };

/* How the fake driver calls the kernel: the lengths of its arguments, and by their addresses. */
static const char tail[] =
    "\nconst unsigned fake_arguments[] = {sizeof(results_t), sizeof(operands_t), 8, 4, 4, 0};\n"
    "void fake_call(void **in) {\n"
    "    pycoll_reduce(*(results_t *)in[0], *(operands_t *)in[1], *(word64_t *)in[2],\n"
    "                  *(int *)in[3], *(int *)in[4]);\n"
    "}\n";

struct program {
    char *text, *log, *image;
    size_t log_size, image_size;
};

extern char **environ;

API const char *nvrtcGetErrorString(int result)
{
    return result == OK ? "NVRTC_SUCCESS" : "NVRTC_ERROR";
}

API int nvrtcVersion(int *major, int *minor)
{
    *major = 13;
    *minor = 0;
    return OK;
}

API int nvrtcGetNumSupportedArchs(int *count)
{
    *count = 2;
    return OK;
}

API int nvrtcGetSupportedArchs(int *archs)
{
    archs[0] = 75;
    archs[1] = 90;
    return OK;
}

API int nvrtcCreateProgram(struct program **made, const char *text, const char *name, int count,
                           const char *const *headers, const char *const *names)
{
    (void)name, (void)headers, (void)names;
    if (count)
        return INVALID_INPUT;
    *made = calloc(1, sizeof **made);
    (*made)->text = strdup(text);
    return OK;
}

API int nvrtcDestroyProgram(struct program **program)
{
    free((*program)->text);
    free((*program)->log);
    free((*program)->image);
    free(*program);
    *program = NULL;
    return OK;
}

static char *contents(int fd, size_t *size)
{
    struct stat stat;
    fstat(fd, &stat);
    char *read = malloc((size_t)stat.st_size + 1);
    *size = (size_t)pread(fd, read, (size_t)stat.st_size, 0);
    read[*size] = 0;
    return read;
}

API int nvrtcCompileProgram(struct program *program, int count, const char *const *options)
{
    (void)count, (void)options;
    if (getenv("FAKE_NVRTC_FAILS"))
        return COMPILATION;
    int source = memfd_create("text", 0), log = memfd_create("log", 0);
    int image = memfd_create("image", 0);
    if (source < 0 || log < 0 || image < 0 ||
        write(source, program->text, strlen(program->text)) < 0 ||
        write(source, tail, sizeof tail - 1) < 0)
        return OUT_OF_MEMORY;
    char from[64], into[64];
    snprintf(from, sizeof from, "/proc/%d/fd/%d", getpid(), source);
    snprintf(into, sizeof into, "/proc/%d/fd/%d", getpid(), image);
    const char *command[] = {"gcc", "-std=gnu11", "-O1", "-w", "-shared", "-fPIC",
                             "-ffp-contract=off", "-fno-strict-aliasing", "-x", "c", from, "-o",
                             into, NULL};
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, log, 2);
    pid_t pid;
    int status = 1;
    if (posix_spawnp(&pid, "gcc", &actions, NULL, (char *const *)command, environ) == 0)
        waitpid(pid, &status, 0);
    posix_spawn_file_actions_destroy(&actions);
    program->log = contents(log, &program->log_size);
    program->image = contents(image, &program->image_size);
    close(source);
    close(log);
    close(image);
    return status ? COMPILATION : OK;
}

API int nvrtcGetProgramLogSize(struct program *program, size_t *size)
{
    *size = program->log_size + 1;
    return OK;
}

API int nvrtcGetProgramLog(struct program *program, char *log)
{
    memcpy(log, program->log ? program->log : "", program->log_size + 1);
    return OK;
}

API int nvrtcGetCUBINSize(struct program *program, size_t *size)
{
    *size = program->image_size;
    return OK;
}

API int nvrtcGetCUBIN(struct program *program, char *image)
{
    memcpy(image, program->image, program->image_size);
    return OK;
}
