-- Whether the tasks of a set have changed, without looking at a million of them.

CREATE TABLE rft.task_change (
    taskset text NOT NULL,
    num_changes bigint NOT NULL DEFAULT 1
);
CREATE INDEX task_change_taskset ON rft.task_change (taskset);
COMMENT ON TABLE rft.task_change IS 'Statements that changed tasks of a set, one row each or several in one; their sum grows with every commit. Rows and not a counter: writers would wait for each other.';
COMMENT ON COLUMN rft.task_change.taskset IS 'The set.';
COMMENT ON COLUMN rft.task_change.num_changes IS 'How many statements the row stands for.';

CREATE FUNCTION rft.note_task_change() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    INSERT INTO rft.task_change (taskset) SELECT DISTINCT taskset FROM changed;
    RETURN NULL;
END
$$;
COMMENT ON FUNCTION rft.note_task_change() IS 'Trigger: notes which tasksets a statement changed.';
CREATE TRIGGER task_inserted AFTER INSERT ON rft.task REFERENCING NEW TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION rft.note_task_change();
CREATE TRIGGER task_updated AFTER UPDATE ON rft.task REFERENCING NEW TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION rft.note_task_change();
CREATE TRIGGER task_deleted AFTER DELETE ON rft.task REFERENCING OLD TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION rft.note_task_change();

-- Each row is folded once, so the sum stays; rows that somebody else folds at this moment are left to them.
CREATE FUNCTION rft.compact_task_changes(of_taskset text) RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    WITH picked AS (
        SELECT ctid FROM rft.task_change WHERE taskset = of_taskset FOR UPDATE SKIP LOCKED),
    gone AS (
        DELETE FROM rft.task_change c WHERE c.ctid = ANY (ARRAY(SELECT ctid FROM picked)) RETURNING c.num_changes)
    INSERT INTO rft.task_change (taskset, num_changes) SELECT of_taskset, sum(num_changes) FROM gone HAVING count(*) > 0
$$;
COMMENT ON FUNCTION rft.compact_task_changes(text) IS 'Puts the changes of a taskset into one row; their sum stays as it is.';

-- A task that moves to another set changes both; there is no reason to do so, and rft.task has no other way to lose one.
CREATE FUNCTION rft.refuse_task_move() RETURNS trigger
LANGUAGE plpgsql
AS $$
BEGIN
    RAISE EXCEPTION 'a task keeps its id and its taskset'
        USING ERRCODE = 'integrity_constraint_violation',
              HINT = 'Exclude it (UPDATE rft.task SET status = ''excluded'') and insert it into the other set.';
END
$$;
COMMENT ON FUNCTION rft.refuse_task_move() IS 'Trigger: tasks are not moved between sets.';
CREATE TRIGGER task_stays
    BEFORE UPDATE ON rft.task FOR EACH ROW WHEN ((OLD.task_id, OLD.taskset) IS DISTINCT FROM (NEW.task_id, NEW.taskset))
    EXECUTE FUNCTION rft.refuse_task_move();
