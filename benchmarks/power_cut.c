/* What survives a power cut: after each fsync and fdatasync, a copy of the file goes to the folder $SHADOW.

   cc -shared -fPIC -O1 -o power_cut.so power_cut.c -ldl;  LD_PRELOAD=./power_cut.so SHADOW=folder python …

   A copy has the file's path with % for /. It is made before the call returns, so whatever a program believes to be on the
   disk is in the copies. Without $SHADOW nothing is copied. With CUT_AT=n the process is killed before the nth of these calls
   reaches the disk: everything written since the one before is at risk then. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void keep(int fd) {
  const char *folder = getenv("SHADOW");
  if (!folder) return;
  char link[64], path[PATH_MAX], to[2 * PATH_MAX], part[2 * PATH_MAX], bytes[1 << 16];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t length = readlink(link, path, sizeof path - 1);
  if (length <= 0 || path[0] != '/') return;
  path[length] = 0;
  /* Closing a second descriptor would drop the process's POSIX locks on the file, so SQLite's own is read. */
  int is_own = (fcntl(fd, F_GETFL) & O_ACCMODE) != O_WRONLY;
  int from = is_own ? fd : open(path, O_RDONLY);
  if (from < 0) return;
  for (char *c = path; *c; c++)
    if (*c == '/') *c = '%';
  snprintf(to, sizeof to, "%s/%s", folder, path);
  snprintf(part, sizeof part, "%s/part", folder);
  int out = open(part, O_WRONLY | O_CREAT | O_TRUNC, 0600);
  off_t at = 0;
  for (ssize_t n; (n = pread(from, bytes, sizeof bytes, at)) > 0; at += n)
    if (write(out, bytes, n) != n) abort();
  close(out);
  if (!is_own) close(from);
  if (rename(part, to)) abort();
}

static void cut(void) {
  static int calls = 0;
  const char *at = getenv("CUT_AT");
  if (at && ++calls == atoi(at)) kill(getpid(), SIGKILL);
}

int fsync(int fd) {
  cut();
  int (*call)(int) = (int (*)(int))dlsym(RTLD_NEXT, "fsync");
  int found = call(fd);
  if (!found) keep(fd);
  return found;
}

int fdatasync(int fd) {
  cut();
  int (*call)(int) = (int (*)(int))dlsym(RTLD_NEXT, "fdatasync");
  int found = call(fd);
  if (!found) keep(fd);
  return found;
}
