/* SQLite in memory: four threads with a database each, which index, join, delete and vacuum rows; a child of a fork reads one.
   Usage: sqlite ROWS. Prints a sum of each database. Linked with SQLite's own source. */
#include <pthread.h>
#include <sqlite3.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#define THREADS 4

struct database {
    sqlite3 *handle;
    int seed;
    long long sum;
};

static int rows;

static void run(sqlite3 *handle, const char *statement) {
    char *why = NULL;
    if (sqlite3_exec(handle, statement, NULL, NULL, &why)) {
        fprintf(stderr, "sqlite: %s: %s\n", statement, why);
        _exit(3);
    }
}

static long long number(sqlite3 *handle, const char *query) {
    sqlite3_stmt *statement;
    if (sqlite3_prepare_v2(handle, query, -1, &statement, NULL) || sqlite3_step(statement) != SQLITE_ROW) {
        fprintf(stderr, "sqlite: %s: %s\n", query, sqlite3_errmsg(handle));
        _exit(4);
    }
    long long found = sqlite3_column_int64(statement, 0);
    sqlite3_finalize(statement);
    return found;
}

static long long sum(sqlite3 *handle) {
    return number(handle, "SELECT total(length(word) * (id % 97) + key % 1009) FROM item");
}

static void *work(void *of) {
    struct database *database = of;
    char insert[256];
    run(database->handle, "CREATE TABLE item (id INTEGER PRIMARY KEY, key INTEGER, word TEXT)");
    snprintf(insert, sizeof insert,
             "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < %d) "
             "INSERT INTO item SELECT i, (i * 7919 + %d) %% 100003, hex(i * i) || printf('%%0*d', i %% 200, i) FROM n",
             rows, database->seed);
    run(database->handle, insert);
    run(database->handle, "CREATE INDEX by_key ON item (key)");
    run(database->handle, "DELETE FROM item WHERE id % 3 = 0");
    run(database->handle, "UPDATE item SET word = word || id WHERE id % 7 = 0");
    run(database->handle, "VACUUM");
    long long pairs = number(database->handle, "SELECT count(*) FROM item a JOIN item b ON a.key = b.key + 1");
    database->sum = sum(database->handle) + pairs;
    if (number(database->handle, "SELECT count(*) FROM pragma_integrity_check WHERE integrity_check <> 'ok'"))
        _exit(5);
    return NULL;
}

int main(int argc, char **argv) {
    struct database databases[THREADS] = {0};
    pthread_t threads[THREADS];
    rows = argc == 2 ? atoi(argv[1]) : 0;
    for (int number = 0; number < THREADS; number++) {
        databases[number].seed = number;
        if (sqlite3_open(":memory:", &databases[number].handle) ||
            pthread_create(&threads[number], NULL, work, &databases[number]))
            return 2;
    }
    for (int number = 0; number < THREADS; number++)
        pthread_join(threads[number], NULL);
    pid_t child = fork();
    if (child == 0)
        _exit(sum(databases[0].handle) == 0);
    int status;
    if (waitpid(child, &status, 0) != child || status)
        return 6;
    for (int number = 0; number < THREADS; number++) {
        printf("%lld\n", databases[number].sum);
        sqlite3_close(databases[number].handle);
    }
    return 0;
}
