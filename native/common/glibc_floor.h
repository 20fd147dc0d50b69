/*
 * glibc_floor.h: makes libraries that are mounted into containers load beside a C library as old as 2.17.
 *
 * The linker binds a symbol to its newest version. The C library has a newer and an old version of the symbols below
 * (2.32 to 2.34 moved libpthread and libdl into libc, without a change of behaviour); this header selects the old one.
 * It is included before everything (-include). A test reads the symbol versions of the result.
 */
#ifndef VGPU_GLIBC_FLOOR_H
#define VGPU_GLIBC_FLOOR_H

#include <features.h>

/*
 * Since 2.38 the headers rename strtoul and related functions (__isoc23_strtoul), which also accept "0b1"; the old ones
 * are selected here.
 */
#undef __GLIBC_USE_C2X_STRTOL
#define __GLIBC_USE_C2X_STRTOL 0
#undef __GLIBC_USE_C23_STRTOL
#define __GLIBC_USE_C23_STRTOL 0

#include <sys/stat.h>

#if defined(__GLIBC__) && __GLIBC_PREREQ(2, 32) && defined(__x86_64__)
#define VGPU_GLIBC_FIRST "GLIBC_2.2.5"
#define VGPU_STAT_VERSION 1
#elif defined(__GLIBC__) && __GLIBC_PREREQ(2, 32) && defined(__aarch64__)
#define VGPU_GLIBC_FIRST "GLIBC_2.17"
#define VGPU_STAT_VERSION 0
#endif

#ifdef VGPU_GLIBC_FIRST
#define VGPU_OLD(name) __asm__(".symver " #name "," #name "@" VGPU_GLIBC_FIRST)
VGPU_OLD(dladdr);
VGPU_OLD(dlopen);
VGPU_OLD(dlclose);
VGPU_OLD(pthread_attr_setstacksize);
VGPU_OLD(pthread_create);
VGPU_OLD(pthread_detach);
VGPU_OLD(pthread_join);
VGPU_OLD(pthread_key_create);
VGPU_OLD(pthread_mutex_trylock);
VGPU_OLD(pthread_once);
VGPU_OLD(pthread_setcancelstate);
VGPU_OLD(pthread_setspecific);
VGPU_OLD(pthread_sigmask);
VGPU_OLD(__fxstat);
VGPU_OLD(__lxstat);

/*
 * C libraries before 2.33 export no fstat and lstat. Their headers call __fxstat and __lxstat instead, with a version
 * number of struct stat.
 */
int __fxstat(int version, int fd, struct stat *about);
int __lxstat(int version, const char *path, struct stat *about);
#define fstat(fd, about) __fxstat(VGPU_STAT_VERSION, fd, about)
#define lstat(path, about) __lxstat(VGPU_STAT_VERSION, path, about)
#endif

#endif
