-- One run. `events` is append-only and is the truth; everything else that rota shows is computed from it.
CREATE TABLE IF NOT EXISTS events (
    seq    INTEGER PRIMARY KEY,
    time_s REAL NOT NULL,
    kind   TEXT NOT NULL,
    task   TEXT NOT NULL DEFAULT '',
    data   TEXT NOT NULL
) STRICT;
CREATE INDEX IF NOT EXISTS events_by_task ON events (task, kind, seq);

-- What other processes ask of the controller (`rota stop`). The controller reads on from the last one it has seen.
CREATE TABLE IF NOT EXISTS requests (
    seq    INTEGER PRIMARY KEY,
    time_s REAL NOT NULL,
    verb   TEXT NOT NULL,
    task   TEXT NOT NULL DEFAULT ''
) STRICT;
