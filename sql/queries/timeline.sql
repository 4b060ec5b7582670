-- name: run_timeline (read)
-- The seconds of a run by role and activity. For each role they add up to the seconds of the run, except for rounding.
-- lives: a process lives from its start to its end; while it is alive, to the newest heartbeat of the run; and at most 15 s longer than its last
-- heartbeat, because the end of a killed process may be recorded days later. Replays run beside the run and do not count.
-- shared: while a role has several processes, a second of each counts as the same part of a second of the run.
-- absent: seconds without a process of the role. Names of rows and steps are removed from details.
WITH workers AS (
    SELECT worker_id, role::text AS role, started_at, heartbeat_at, coalesce(stopped_at, heartbeat_at) AS seen_at,
           stopped_at IS NULL AND heartbeat_at > rft.clock() - interval '15 s' AS is_alive
    FROM rft.worker WHERE run_id = %(run_id)s AND role <> 'replay'),
lives AS (
    SELECT worker_id, role, tstzrange(started_at, greatest(started_at,
               CASE WHEN is_alive THEN (SELECT max(seen_at) FROM workers) ELSE least(seen_at, heartbeat_at + interval '15 s') END)) AS life
    FROM workers),
whole AS (SELECT range_agg(life) AS life FROM lives),
roles AS (SELECT role, range_agg(life) AS life FROM lives GROUP BY role),
slices AS (
    SELECT role, tstzrange(at, lead(at) OVER (PARTITION BY role ORDER BY at)) AS slice
    FROM (SELECT DISTINCT role, unnest(ARRAY[lower(life), upper(life)]) AS at FROM lives WHERE NOT isempty(life)) AS bounds),
shared AS (SELECT s.role, s.slice, count(*) AS num FROM slices s JOIN lives l ON l.role = s.role AND l.life @> s.slice GROUP BY s.role, s.slice),
recorded AS (
    SELECT l.role, p.activity, regexp_replace(p.detail, '\m(step|version)s? [0-9]+', '\1 …', 'g') AS detail,
           sum(extract(epoch FROM upper(o.part) - lower(o.part)) / s.num) AS seconds
    FROM lives l JOIN rft.worker_span p USING (worker_id)
    JOIN shared s ON s.role = l.role AND l.life @> s.slice
    CROSS JOIN LATERAL (SELECT s.slice * tstzrange(p.started_at, greatest(p.started_at, p.ended_at)) AS part) o
    WHERE NOT isempty(o.part) GROUP BY 1, 2, 3),
absent AS (
    SELECT r.role, CASE WHEN upper(gap) <= lower(r.life) THEN 'not started' WHEN lower(gap) >= upper(r.life) THEN 'ended' ELSE 'no process' END AS activity,
           extract(epoch FROM upper(gap) - lower(gap)) AS seconds
    FROM roles r CROSS JOIN whole w CROSS JOIN LATERAL unnest(w.life - r.life) AS gap),
unrecorded AS (
    SELECT role, sum(seconds) AS seconds FROM (
        SELECT role, extract(epoch FROM upper(slice) - lower(slice)) AS seconds FROM shared
        UNION ALL SELECT role, -seconds FROM recorded) AS parts
    GROUP BY role)
SELECT role, activity, detail, seconds::double precision AS seconds FROM recorded
UNION ALL SELECT role, activity, NULL, sum(seconds)::double precision FROM absent GROUP BY role, activity
UNION ALL SELECT role, 'not recorded', NULL, seconds::double precision FROM unrecorded WHERE seconds >= 0.0005
ORDER BY role, seconds DESC, activity, detail;

-- name: run_processes (read)
-- Number of processes that each role of a run has had.
SELECT role::text AS role, count(*) AS num_processes FROM rft.worker WHERE run_id = %(run_id)s AND role <> 'replay' GROUP BY 1;

-- name: run_steps_made (read)
-- Number of steps that all attempts of a run have made, with those made again after a crash.
SELECT count(*) AS num_steps FROM rft.train_step WHERE run_id = %(run_id)s;
