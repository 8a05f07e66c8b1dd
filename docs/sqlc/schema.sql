-- What sqlc has to know of the extension's tables. For sqlc only: in a database, CREATE EXTENSION outbox makes the real
-- ones, with indexes, trigger and privileges.

CREATE TABLE outbox_events (
    id             uuid         PRIMARY KEY DEFAULT gen_random_uuid(),
    aggregate_type varchar(100) NOT NULL,
    aggregate_id   varchar(100) NOT NULL,
    event_type     varchar(100) NOT NULL,
    payload        jsonb        NOT NULL,
    attempts       int          NOT NULL DEFAULT 0,
    created_at     timestamptz  NOT NULL DEFAULT now(),
    processed_at   timestamptz,
    seq            bigint       NOT NULL GENERATED ALWAYS AS IDENTITY,
    headers        jsonb,
    retry_after    timestamptz,
    last_error     text,
    origin         int          NOT NULL
);

CREATE TABLE processed_events (
    event_id     uuid        PRIMARY KEY,
    processed_at timestamptz NOT NULL DEFAULT now()
);
