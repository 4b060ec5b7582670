-- Tables of the bare layout; see bare_layout.py.
DROP SCHEMA IF EXISTS bare CASCADE;
CREATE SCHEMA bare;
CREATE TABLE bare.experience (
    key bigint PRIMARY KEY,
    group_key bigint NOT NULL,
    prompt text NOT NULL,
    response text NOT NULL,
    num_prompt_tokens integer NOT NULL,
    num_tokens integer NOT NULL,
    reward double precision NOT NULL,
    metrics jsonb NOT NULL,
    file text NOT NULL,
    file_row integer NOT NULL
);
CREATE TABLE bare.queue (key bigint PRIMARY KEY, available boolean NOT NULL DEFAULT true) WITH (fillfactor = 70);
CREATE INDEX queue_available ON bare.queue (key) WHERE available;
