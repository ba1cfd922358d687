/* Reads long bodies beside the loop: a body of 64 MB takes a second, a stream's token must not. */
#include <errno.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "serve/front_impl.h"

static yard_front_job *next_job(yard_front_reader *r)
{
    yard_front_job *job;

    while (!r->first && !r->stop)
        pthread_cond_wait(&r->wake, &r->mutex);
    job = r->stop ? NULL : r->first;
    if (job) {
        r->first = job->next_read;
        if (!r->first)
            r->last = &r->first;
    }
    return job;
}

static void *read_bodies(void *arg)
{
    yard_front_reader *r = arg;
    const uint64_t one = 1;
    yard_front_job *job;

    pthread_mutex_lock(&r->mutex);
    while ((job = next_job(r))) {
        pthread_mutex_unlock(&r->mutex);
        yard_front_prepare(&job->prepared, r->model, job->route, job->body, job->n_bytes,
                           job->context);
        pthread_mutex_lock(&r->mutex);
        job->next_read = r->done;
        r->done = job;
        if (write(r->fd, &one, sizeof(one)) < 0)
            continue; /* full means readable, which is all that is wanted */
    }
    pthread_mutex_unlock(&r->mutex);
    return NULL;
}

yard_status yard_front_reader_open(yard_front_reader *r, const yard_front_model_data *model,
                                   yard_error *err)
{
    *r = (yard_front_reader){ .model = model, .fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC) };
    r->last = &r->first;
    if (r->fd < 0)
        return yard_fail(err, YARD_EIO, "front: eventfd: %s", strerror(errno));
    pthread_mutex_init(&r->mutex, NULL);
    pthread_cond_init(&r->wake, NULL);
    r->running = true;
    if (pthread_create(&r->thread, NULL, read_bodies, r) != 0) {
        r->running = false;
        pthread_mutex_destroy(&r->mutex);
        pthread_cond_destroy(&r->wake);
        close(r->fd);
        r->fd = -1;
        return yard_fail(err, YARD_ENOMEM, "front: cannot start a thread");
    }
    return YARD_OK;
}

void yard_front_reader_close(yard_front_reader *r)
{
    if (!r->running)
        return;
    pthread_mutex_lock(&r->mutex);
    r->stop = true;
    pthread_cond_signal(&r->wake);
    pthread_mutex_unlock(&r->mutex);
    pthread_join(r->thread, NULL);
    pthread_mutex_destroy(&r->mutex);
    pthread_cond_destroy(&r->wake);
    close(r->fd);
    r->running = false;
}

void yard_front_reader_give(yard_front_reader *r, yard_front_job *job)
{
    job->with_thread = true;
    job->next_read = NULL;
    pthread_mutex_lock(&r->mutex);
    *r->last = job;
    r->last = &job->next_read;
    pthread_cond_signal(&r->wake);
    pthread_mutex_unlock(&r->mutex);
}

yard_front_job *yard_front_reader_take(yard_front_reader *r)
{
    yard_front_job *job;
    uint64_t count;

    pthread_mutex_lock(&r->mutex);
    job = r->done;
    if (job)
        r->done = job->next_read;
    else if (read(r->fd, &count, sizeof(count)) < 0)
        count = 0; /* it was not readable */
    pthread_mutex_unlock(&r->mutex);
    if (job)
        job->with_thread = false;
    return job;
}
