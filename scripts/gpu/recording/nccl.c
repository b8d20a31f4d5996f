// NCCL without GPUs, for processes of one machine over the driver that records: memory is the host's, values go over sockets of
// this machine, the first rank adds them up in the order of the ranks. A collective runs when its stream has come to it, and the
// host does not wait for it. Calls are written where the driver writes its own:
//   joined RANK SIZE    collective STREAM NAME VALUES TYPE    group STREAM COLLECTIVES
//   came RANK NAME BYTES SUM OF BYTES, when values have come    failed RESULT WHY
//
// GPU_NCCL_DELAY_MS        what each group of collectives takes before it reads anything
// GPU_NCCL_HANG=RANK:N     the N-th group of this rank, from 1, never begins
// GPU_NCCL_ERROR=RANK:N    it ends without values, with an error that is told when it is asked for
// GPU_NCCL_REFUSE=RANK:N   its start is refused
// GPU_NCCL_KILL=RANK:N     this rank is killed when it begins; GPU_NCCL_STOP: it is stopped
// GPU_NCCL_INIT=RANK:fail  this rank does not join; RANK:hang: it never comes; RANK:kill: it is killed before
// GPU_NCCL_EXIT=hang       a process does not end by itself while a collective is under way
// GPU_NCCL_PATIENCE_S      what any wait takes at most, so that no test hangs (120)
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "streams.h"

#define record recording_write

enum result { SUCCESS, UNHANDLED, SYSTEM, INTERNAL, ARGUMENT, USAGE, REMOTE };
enum kind { ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER };
enum type { F16 = 6, F32 = 7, BF16 = 9 };
enum { SUM = 0, LOOK_MS = 20, NAME = 32 };

typedef struct { char internal[128]; } ncclUniqueId;
struct part { int kind, type; uint64_t count; const char *own; char *result; };
// What each rank tells the first one before its values.
struct head { int kind, type; uint64_t count; };

struct ncclComm {
  int rank, size;
  // The first rank has one of every rank, the others one to the first.
  int *peers;
  atomic_int error, is_aborted, running;
};
struct group { struct ncclComm *comm; struct recording_stream *stream; int number, parts; struct part part[]; };

static atomic_int all_running;

static const char *const KINDS[] = {"all_reduce", "reduce_scatter", "all_gather"};

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec + 1e-9 * time.tv_nsec;
}
static double patience(void) { return getenv("GPU_NCCL_PATIENCE_S") ? atof(getenv("GPU_NCCL_PATIENCE_S")) : 120; }

// What the environment says of a rank after the colon, if it is this one.
static const char *of_rank(const char *variable, int rank) {
  const char *told = getenv(variable), *colon = told ? strchr(told, ':') : NULL;
  return colon && atoi(told) == rank ? colon + 1 : NULL;
}
static int is_turn(const char *variable, const struct group *group) {
  const char *turn = of_rank(variable, group->comm->rank);
  return turn && atoi(turn) == group->number;
}
static enum result failed(enum result result, const char *why) {
  record("failed %d %s\n", result, why);
  return result;
}

// Values as f32 and back, rounded to the nearest, of two in the middle to the even one.
static float bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}
static float read_value(const char *from, int type, uint64_t at) {
  uint16_t half;
  float value;
  if (type == F32) return memcpy(&value, from + 4 * at, 4), value;
  memcpy(&half, from + 2 * at, 2);
  if (type == BF16) return bits((uint32_t)half << 16);
  uint32_t sign = (half & 0x8000u) << 16, exponent = half >> 10 & 31, mantissa = half & 1023;
  if (!exponent) return (sign ? -1.0f : 1.0f) * mantissa * 0x1p-24f;
  return bits(sign | (exponent == 31 ? 255 : exponent + 112) << 23 | mantissa << 13);
}
static void write_value(char *to, int type, uint64_t at, float value) {
  uint32_t whole;
  memcpy(&whole, &value, 4);
  if (type == F32) {
    memcpy(to + 4 * at, &value, 4);
    return;
  }
  uint32_t sign = whole >> 16 & 0x8000, size = whole & 0x7fffffff, half;
  if (type == BF16) half = size > 0x7f800000 ? whole >> 16 | 64 : (whole + 0x7fff + (whole >> 16 & 1)) >> 16;
  else if (size > 0x7f800000) half = sign | 0x7e00;
  else if (size >= 0x477ff000) half = sign | 0x7c00;
  else if (size >= 0x38800000) half = sign | (size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13;
  else {
    // Adding makes the last place that of the smallest number.
    float rounded = bits(size) + 0.5f;
    memcpy(&whole, &rounded, 4);
    half = sign | (whole - 0x3f000000);
  }
  uint16_t short_ = half;
  memcpy(to + 2 * at, &short_, 2);
}
static size_t width(int type) { return type == F32 ? 4 : 2; }

// Moves bytes over a socket until all are through, the communicator is aborted, or it takes too long.
static int moved(struct ncclComm *comm, int socket, void *bytes, size_t count, int is_out) {
  double until = now() + patience();
  for (char *at = bytes; count;) {
    struct pollfd ready = {.fd = socket, .events = is_out ? POLLOUT : POLLIN};
    if (comm->is_aborted || now() > until) return 0;
    if (poll(&ready, 1, LOOK_MS) <= 0) continue;
    ssize_t some = is_out ? send(socket, at, count, MSG_NOSIGNAL | MSG_DONTWAIT) : recv(socket, at, count, MSG_DONTWAIT);
    if (some < 0 && (errno == EAGAIN || errno == EINTR)) continue;
    if (some <= 0) return 0;
    at += some;
    count -= some;
  }
  return 1;
}

// What a rank brings and takes, in values.
static uint64_t brings(const struct part *part, int size) { return part->kind == REDUCE_SCATTER ? part->count * size : part->count; }
static uint64_t takes(const struct part *part, int size) { return part->kind == ALL_GATHER ? part->count * size : part->count; }

// The first rank's side: it hears all, and answers each. Others' values lie in the order of the ranks.
static enum result serve(struct ncclComm *comm, const struct part *part) {
  size_t one = brings(part, comm->size) * width(part->type), answer = takes(part, comm->size) * width(part->type);
  char *all = malloc(one * comm->size + 1), *back = malloc(answer + 1);
  enum result result = SUCCESS;
  memcpy(all, part->own, one);
  for (int rank = 1; rank < comm->size && !result; rank++) {
    struct head head;
    if (!moved(comm, comm->peers[rank], &head, sizeof head, 0)) result = REMOTE;
    else if (head.kind != part->kind || head.type != part->type || head.count != part->count)
      result = failed(USAGE, "ranks do not call the same");
    else if (!moved(comm, comm->peers[rank], all + rank * one, one, 0)) result = REMOTE;
  }
  for (int rank = comm->size - 1; rank >= 0; rank--) {
    uint64_t first = part->kind == REDUCE_SCATTER ? rank * part->count : 0;
    if (part->kind == ALL_GATHER) memcpy(back, all, answer);
    else for (uint64_t i = 0; i < part->count; i++) {
      float sum = 0;
      for (int from = 0; from < comm->size; from++) sum += read_value(all + from * one, part->type, first + i);
      write_value(back, part->type, i, sum);
    }
    int told = result;
    if (rank == 0) {
      if (!result) memcpy(part->result, back, answer);
    } else if ((!moved(comm, comm->peers[rank], &told, sizeof told, 1) ||
                (!told && !moved(comm, comm->peers[rank], back, answer, 1))) && !result) result = REMOTE;
  }
  free(all);
  free(back);
  return result;
}

static enum result ask(struct ncclComm *comm, const struct part *part) {
  struct head head = {part->kind, part->type, part->count};
  size_t one = brings(part, comm->size) * width(part->type), answer = takes(part, comm->size) * width(part->type);
  int told = REMOTE;
  if (!moved(comm, *comm->peers, &head, sizeof head, 1) || !moved(comm, *comm->peers, (void *)part->own, one, 1) ||
      !moved(comm, *comm->peers, &told, sizeof told, 0))
    return REMOTE;
  if (told) return told;
  return moved(comm, *comm->peers, part->result, answer, 0) ? SUCCESS : REMOTE;
}

// Which values came: of all ranks the same, but for parts of sums.
static void tell(struct ncclComm *comm, const struct part *part) {
  uint64_t bytes = takes(part, comm->size) * width(part->type), sum = 0;
  for (uint64_t i = 0; i < bytes; i++) sum = 31 * sum + (unsigned char)part->result[i];
  record("came %d %s %llu %llu\n", comm->rank, KINDS[part->kind], (unsigned long long)bytes, (unsigned long long)sum);
}

static void until_aborted(struct ncclComm *comm) {
  for (double until = now() + patience(); !comm->is_aborted && now() < until;) usleep(1000 * LOOK_MS);
}

static void run(struct recording_work *work) {
  struct group *group = work->to;
  struct ncclComm *comm = group->comm;
  enum result result = SUCCESS;
  if (getenv("GPU_NCCL_DELAY_MS")) usleep(1000 * atoi(getenv("GPU_NCCL_DELAY_MS")));
  if (is_turn("GPU_NCCL_KILL", group)) raise(SIGKILL);
  if (is_turn("GPU_NCCL_STOP", group)) raise(SIGSTOP);
  if (is_turn("GPU_NCCL_HANG", group)) until_aborted(comm);
  else if (is_turn("GPU_NCCL_ERROR", group)) comm->error = SYSTEM;
  else
    for (int i = 0; i < group->parts && !result && !comm->is_aborted; i++) {
      result = comm->rank ? ask(comm, &group->part[i]) : serve(comm, &group->part[i]);
      if (!result) tell(comm, &group->part[i]);
    }
  // As on a GPU: what does not end by itself ends when it is aborted.
  if (result && !comm->is_aborted) {
    comm->error = result;
    until_aborted(comm);
  }
  comm->running--;
  all_running--;
  free(group);
}

// A group is the calling thread's.
static _Thread_local struct group *open_group;
static _Thread_local int depth, refused;

static enum result start(struct group *group) {
  static atomic_int groups;
  group->number = ++groups;
  if (is_turn("GPU_NCCL_REFUSE", group)) {
    free(group);
    return failed(SYSTEM, "refused");
  }
  record("group %p %d\n", (void *)group->stream, group->parts);
  group->comm->running++;
  all_running++;
  recording_submit(group->stream, (struct recording_work){.run = run, .to = group}, 1);
  return SUCCESS;
}

int ncclGroupStart(void) {
  depth++;
  return SUCCESS;
}
int ncclGroupEnd(void) {
  if (!depth) return failed(USAGE, "no group was begun");
  if (--depth) return SUCCESS;
  struct group *group = open_group;
  enum result result = refused;
  open_group = NULL;
  refused = SUCCESS;
  if (group && result) free(group);
  return result || !group ? result : start(group);
}

static enum result checked(const struct part *part, int op, struct ncclComm *comm, struct recording_stream *stream) {
  if (!comm || !stream) return failed(ARGUMENT, "no communicator or no stream");
  if (comm->is_aborted) return failed(ARGUMENT, "the communicator was aborted");
  if (comm->error) return failed(USAGE, "the communicator has failed");
  if (op != SUM || (part->type != F16 && part->type != F32 && part->type != BF16)) return failed(ARGUMENT, "another type or operation");
  if (part->count && (!part->own || !part->result)) return failed(ARGUMENT, "no memory");
  if (open_group && (open_group->comm != comm || open_group->stream != stream)) return failed(USAGE, "a group of several streams");
  return SUCCESS;
}
static int collective(struct part part, int op, struct ncclComm *comm, struct recording_stream *stream) {
  enum result result = checked(&part, op, comm, stream);
  ncclGroupStart();
  if (result) refused = result;
  else {
    int parts = open_group ? open_group->parts : 0;
    // Nothing is nothing to do.
    struct group *group = realloc(open_group, sizeof *group + (parts + 1) * sizeof part);
    record("collective %p %s %llu %d\n", (void *)stream, KINDS[part.kind], (unsigned long long)part.count, part.type);
    group->comm = comm;
    group->stream = stream;
    group->parts = parts;
    if (part.count) group->part[group->parts++] = part;
    open_group = group;
  }
  enum result ended = ncclGroupEnd();
  return result ? result : ended;
}
int ncclAllReduce(const void *own, void *result, size_t count, int type, int op, struct ncclComm *comm, void *stream) {
  return collective((struct part){ALL_REDUCE, type, count, own, result}, op, comm, stream);
}
int ncclReduceScatter(const void *own, void *result, size_t count, int type, int op, struct ncclComm *comm, void *stream) {
  return collective((struct part){REDUCE_SCATTER, type, count, own, result}, op, comm, stream);
}
int ncclAllGather(const void *own, void *result, size_t count, int type, struct ncclComm *comm, void *stream) {
  return collective((struct part){ALL_GATHER, type, count, own, result}, SUM, comm, stream);
}

int ncclGetVersion(int *version) {
  *version = 22800;
  return SUCCESS;
}
int ncclGetUniqueId(ncclUniqueId *id) {
  unsigned char bytes[NAME / 2];
  if (getrandom(bytes, sizeof bytes, 0) != sizeof bytes) return failed(SYSTEM, "no random numbers");
  memset(id, 0, sizeof *id);
  for (unsigned i = 0; i < sizeof bytes; i++) snprintf(id->internal + 2 * i, 3, "%02x", bytes[i]);
  return SUCCESS;
}

// Each rank says its number, and hears that all are there.
static int meet(struct ncclComm *comm, const struct sockaddr_un *place, socklen_t length) {
  double until = now() + patience();
  if (comm->rank) {
    int all = 0, joined = -1;
    *comm->peers = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    while ((joined = connect(*comm->peers, (const struct sockaddr *)place, length)) && now() < until) usleep(1000 * LOOK_MS);
    return !joined && moved(comm, *comm->peers, &comm->rank, sizeof comm->rank, 1) && moved(comm, *comm->peers, &all, sizeof all, 0) &&
           all == comm->size;
  }
  int door = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0), are_there = 1;
  if (bind(door, (const struct sockaddr *)place, length) || listen(door, comm->size)) return 0;
  while (are_there < comm->size && now() < until) {
    struct pollfd ready = {.fd = door, .events = POLLIN};
    if (poll(&ready, 1, LOOK_MS) <= 0) continue;
    int rank = 0, peer = accept4(door, NULL, NULL, SOCK_CLOEXEC);
    if (!moved(comm, peer, &rank, sizeof rank, 0) || rank <= 0 || rank >= comm->size || comm->peers[rank]) return 0;
    comm->peers[rank] = peer;
    are_there++;
  }
  close(door);
  for (int rank = 1; rank < comm->size && are_there == comm->size; rank++)
    if (!moved(comm, comm->peers[rank], &comm->size, sizeof comm->size, 1)) return 0;
  return are_there == comm->size;
}
int ncclCommInitRank(struct ncclComm **made, int size, ncclUniqueId id, int rank) {
  const char *fault = of_rank("GPU_NCCL_INIT", rank);
  if (size < 1 || rank < 0 || rank >= size) return failed(ARGUMENT, "no such rank");
  if (fault && !strcmp(fault, "fail")) return failed(SYSTEM, "is not to join");
  if (fault && !strcmp(fault, "kill")) raise(SIGKILL);
  struct ncclComm *comm = calloc(1, sizeof *comm);
  comm->rank = rank;
  comm->size = size;
  comm->peers = calloc(size, sizeof *comm->peers);
  if (fault) until_aborted(comm);
  // A name of the kernel's own: it leaves no file.
  struct sockaddr_un place = {.sun_family = AF_UNIX};
  memcpy(place.sun_path + 1, id.internal, NAME);
  if (fault || !meet(comm, &place, offsetof(struct sockaddr_un, sun_path) + 1 + NAME)) return failed(SYSTEM, "the ranks do not meet");
  record("joined %d %d\n", rank, size);
  *made = comm;
  return SUCCESS;
}
int ncclCommGetAsyncError(struct ncclComm *comm, int *state) {
  *state = comm->error;
  return SUCCESS;
}
// What it has under way is over when this returns. It is not given back: a later use is told.
int ncclCommAbort(struct ncclComm *comm) {
  record("abort %d\n", comm->rank);
  comm->is_aborted = 1;
  for (int rank = 0; rank < comm->size; rank++)
    if (comm->peers[rank]) shutdown(comm->peers[rank], SHUT_RDWR);
  while (comm->running) usleep(1000);
  return SUCCESS;
}
__attribute__((destructor)) static void at_exit(void) {
  if (!getenv("GPU_NCCL_EXIT")) return;
  for (double until = now() + patience(); all_running && now() < until;) usleep(1000 * LOOK_MS);
}
