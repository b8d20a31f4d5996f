// GPU_DELAY_US: each piece of work takes so long, as on a GPU that has much to do. Work that should have waited for another
// stream's then comes too early.
#include "streams.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

struct queued {
  struct recording_work work;
  // Waits until the event has come so far, or tells it that it has.
  struct recording_event *waits_for, *tells;
  uint64_t turn;
  struct queued *next;
};
struct recording_stream {
  struct queued *first, **last;
  int is_busy, has_thread;
};
struct recording_event {
  struct recording_stream *stream;
  // How often it was recorded, and how many of these are done.
  uint64_t recorded, done;
  // The handle, and what is queued with it.
  int users;
  double ms;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;

void recording_write(const char *format, ...) {
  static pthread_mutex_t writing = PTHREAD_MUTEX_INITIALIZER;
  static FILE *file;
  pthread_mutex_lock(&writing);
  if (!file) {
    const char *named = getenv("GPU_CALLS") ? getenv("GPU_CALLS") : "/dev/null";
    char path[4096];
    struct stat found;
    int is_folder = !stat(named, &found) && S_ISDIR(found.st_mode);
    snprintf(path, sizeof path, is_folder ? "%s/%d" : "%s", named, (int)getpid());
    file = fopen(path, "a");
  }
  va_list arguments;
  va_start(arguments, format);
  if (file) vfprintf(file, format, arguments), fflush(file);
  va_end(arguments);
  pthread_mutex_unlock(&writing);
}

static useconds_t delay(void) {
  static int known = -1;
  if (known < 0) known = getenv("GPU_DELAY_US") ? atoi(getenv("GPU_DELAY_US")) : 0;
  return known;
}

// All below is called with the lock held.
static void leave(struct recording_event *event) {
  if (!--event->users) free(event);
}

static int is_ready(const struct queued *next) { return !next->waits_for || next->waits_for->done >= next->turn; }

static void run(struct recording_stream *stream, struct queued *queued) {
  stream->is_busy = 1;
  pthread_mutex_unlock(&lock);
  if (queued->work.run) {
    if (delay()) usleep(delay());
    queued->work.run(&queued->work);
  }
  pthread_mutex_lock(&lock);
  stream->is_busy = 0;
  if (queued->waits_for) leave(queued->waits_for);
  if (queued->tells) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    queued->tells->ms = 1e3 * now.tv_sec + 1e-6 * now.tv_nsec;
    if (queued->tells->done < queued->turn) queued->tells->done = queued->turn;
    leave(queued->tells);
  }
  free(queued);
  pthread_cond_broadcast(&changed);
}

static void *work(void *argument) {
  struct recording_stream *stream = argument;
  pthread_mutex_lock(&lock);
  for (;;) {
    while (stream->is_busy || !stream->first || !is_ready(stream->first)) pthread_cond_wait(&changed, &lock);
    struct queued *next = stream->first;
    stream->first = next->next;
    if (!stream->first) stream->last = &stream->first;
    run(stream, next);
  }
  return NULL;
}

static void add(struct recording_stream *stream, struct queued queued, int is_long) {
  struct queued *added = malloc(sizeof *added);
  *added = queued;
  if (!is_long && !delay() && !stream->first && !stream->is_busy && is_ready(added)) {
    run(stream, added);
    return;
  }
  *stream->last = added;
  stream->last = &added->next;
  if (!stream->has_thread) {
    pthread_t thread;
    stream->has_thread = !pthread_create(&thread, NULL, work, stream);
    if (!stream->has_thread) abort();
    pthread_detach(thread);
  }
  pthread_cond_broadcast(&changed);
}

// And this without.
struct recording_stream *recording_stream_new(void) {
  struct recording_stream *stream = calloc(1, sizeof *stream);
  stream->last = &stream->first;
  return stream;
}

void recording_submit(struct recording_stream *stream, struct recording_work work, int is_long) {
  pthread_mutex_lock(&lock);
  add(stream, (struct queued){.work = work}, is_long);
  pthread_mutex_unlock(&lock);
}

void recording_stream_wait(struct recording_stream *stream, struct recording_event *event) {
  pthread_mutex_lock(&lock);
  event->users++;
  add(stream, (struct queued){.waits_for = event, .turn = event->recorded}, 0);
  pthread_mutex_unlock(&lock);
}

void recording_stream_synchronise(struct recording_stream *stream) {
  pthread_mutex_lock(&lock);
  while (stream->first || stream->is_busy) pthread_cond_wait(&changed, &lock);
  pthread_mutex_unlock(&lock);
}

struct recording_event *recording_event_new(void) {
  struct recording_event *event = calloc(1, sizeof *event);
  event->users = 1;
  return event;
}

void recording_event_record(struct recording_event *event, struct recording_stream *stream) {
  pthread_mutex_lock(&lock);
  event->stream = stream;
  event->users++;
  add(stream, (struct queued){.tells = event, .turn = ++event->recorded}, 0);
  pthread_mutex_unlock(&lock);
}

int recording_event_is_done(struct recording_event *event, int waits) {
  pthread_mutex_lock(&lock);
  uint64_t turn = event->recorded;
  while (waits && event->done < turn) pthread_cond_wait(&changed, &lock);
  int is_done = event->done >= turn;
  pthread_mutex_unlock(&lock);
  return is_done;
}

struct recording_stream *recording_event_stream(const struct recording_event *event) { return event->stream; }
double recording_event_ms(const struct recording_event *event) { return event->ms; }

void recording_event_free(struct recording_event *event) {
  pthread_mutex_lock(&lock);
  leave(event);
  pthread_mutex_unlock(&lock);
}
