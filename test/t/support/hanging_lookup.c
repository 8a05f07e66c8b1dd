/*
 * A name lookup that hangs, for LD_PRELOAD: getaddrinfo() of the host named in HANGING_LOOKUP_HOST
 * takes a minute and then fails. Each such lookup appends a byte to the file HANGING_LOOKUP_LOG
 * first.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <netdb.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

typedef int (*lookup_function)(const char*, const char*, const struct addrinfo*, struct addrinfo**);

static void note_lookup(void) {
    const char* log = getenv("HANGING_LOOKUP_LOG");
    int file = log == NULL ? -1 : open(log, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    if (file >= 0) {
        if (write(file, "x", 1) != 1) {
            abort();
        }
        close(file);
    }
}

static void hang(void) {
    struct timespec left = {60, 0};
    while (nanosleep(&left, &left) != 0) {
    }
}

int getaddrinfo(const char* name, const char* service, const struct addrinfo* hints,
                struct addrinfo** result) {
    const char* hanging = getenv("HANGING_LOOKUP_HOST");
    if (name != NULL && hanging != NULL && strcmp(name, hanging) == 0) {
        note_lookup();
        hang();
        return EAI_AGAIN;
    }
    lookup_function next = (lookup_function)dlsym(RTLD_NEXT, "getaddrinfo");
    return next(name, service, hints, result);
}
