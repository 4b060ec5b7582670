-- The queue of questions as pages walk through it: by deadline, and by id where deadlines are equal. Without the id, a page of the queue would sort
-- all questions of one deadline.
DROP INDEX rft.review_open;
CREATE INDEX review_open ON rft.review (deadline, review_id) WHERE answer IS NULL;
