-- Origins of imported groups and experiences.

CREATE TABLE rft.group_origin (
    group_id bigint PRIMARY KEY,
    run_id bigint NOT NULL,
    buffer_id uuid NOT NULL,
    origin_run_id bigint NOT NULL,
    origin_run text NOT NULL,
    origin_group_id bigint NOT NULL,
    explore_step integer NOT NULL,
    group_size integer NOT NULL,
    imported_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    UNIQUE (run_id, buffer_id, origin_group_id)
);
COMMENT ON TABLE rft.group_origin IS 'Origin of an imported group in the buffer from which it was exported. A group is imported into a run once.';
COMMENT ON COLUMN rft.group_origin.group_id IS 'The group here.';
COMMENT ON COLUMN rft.group_origin.run_id IS 'The run it was imported into.';
COMMENT ON COLUMN rft.group_origin.buffer_id IS 'The buffer it was exported from; may be this one.';
COMMENT ON COLUMN rft.group_origin.origin_run_id IS 'Its run there.';
COMMENT ON COLUMN rft.group_origin.origin_run IS 'That run''s name.';
COMMENT ON COLUMN rft.group_origin.origin_group_id IS 'Its key there.';
COMMENT ON COLUMN rft.group_origin.explore_step IS 'Its explorer step there.';
COMMENT ON COLUMN rft.group_origin.group_size IS 'Number of its rollouts there; the import has fewer if only some were exported.';
COMMENT ON COLUMN rft.group_origin.imported_at IS 'When. Older labels came with the import.';

CREATE TABLE rft.experience_origin (
    experience_id bigint PRIMARY KEY,
    origin_experience_id bigint NOT NULL,
    origin_parent_id bigint,
    source rft.experience_source NOT NULL,
    policy_version_min bigint,
    policy_version_max bigint,
    policy_step integer,
    sampled_at timestamptz NOT NULL,
    earlier jsonb NOT NULL DEFAULT '[]'
);
CREATE INDEX experience_origin_id ON rft.experience_origin (origin_experience_id);
COMMENT ON TABLE rft.experience_origin IS 'Origin of an imported experience in the buffer from which it was exported; its group''s row in group_origin names buffer and run.';
COMMENT ON COLUMN rft.experience_origin.experience_id IS 'The experience here.';
COMMENT ON COLUMN rft.experience_origin.origin_experience_id IS 'Its key there.';
COMMENT ON COLUMN rft.experience_origin.origin_parent_id IS 'Key there of the experience it was made from.';
COMMENT ON COLUMN rft.experience_origin.source IS 'Its first source; here the source is import.';
COMMENT ON COLUMN rft.experience_origin.policy_version_min IS 'There, the policy version of its oldest sampled token. Versions of another buffer are not valid here, so rft.experience has none.';
COMMENT ON COLUMN rft.experience_origin.policy_version_max IS 'There, the policy version of its newest sampled token.';
COMMENT ON COLUMN rft.experience_origin.policy_step IS 'Trainer step of policy_version_min there.';
COMMENT ON COLUMN rft.experience_origin.sampled_at IS 'When it was first stored in any buffer.';
COMMENT ON COLUMN rft.experience_origin.earlier IS 'Its earlier origins: objects with buffer_id, run and experience_id, the first buffer first.';

CREATE TABLE rft.import_file (
    run_id bigint NOT NULL REFERENCES rft.run,
    path text NOT NULL,
    digest text NOT NULL,
    started_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    finished_at timestamptz,
    PRIMARY KEY (run_id, path)
);
COMMENT ON TABLE rft.import_file IS 'A file that was imported into a run; the newest import of its path.';
COMMENT ON COLUMN rft.import_file.run_id IS 'The run that it was imported into.';
COMMENT ON COLUMN rft.import_file.path IS 'The absolute path of the file or folder, on the machine that imported it.';
COMMENT ON COLUMN rft.import_file.digest IS 'xxh3-128 of its bytes, hexadecimal. An interrupted import continues only with the same content.';
COMMENT ON COLUMN rft.import_file.started_at IS 'When the newest import of the file began.';
COMMENT ON COLUMN rft.import_file.finished_at IS 'When all of its groups were stored; NULL if the import was interrupted.';
