-- Sources shrink. What was stored of them stays, and can be told from the rest.

ALTER TABLE rft.task ADD COLUMN left_source_at timestamptz;
COMMENT ON COLUMN rft.task.left_source_at IS 'When a load found that its source does not have it (any more); NULL while it has, and for tasks that stages made.';

CREATE OR REPLACE VIEW rft.v_task AS
SELECT t.task_id, t.taskset, t.task_key, t.status, t.status_pinned, t.payload -> 'prompt' AS prompt, t.payload ->> 'answer' AS answer,
       t.payload -> 'metadata' AS metadata, t.features, coalesce(t.source_features, t.features) AS source_features,
       v.kept, v.stage, v.reason, v.pipeline_version, v.decided_at, t.created_at, t.manual_features, t.left_source_at
FROM rft.task t LEFT JOIN rft.task_verdict v ON v.task_verdict_id = t.task_verdict_id;
