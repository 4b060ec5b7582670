-- What was made of an experience is found by it.
CREATE INDEX experience_parent ON rft.experience (parent_id) WHERE parent_id IS NOT NULL;
CREATE INDEX task_parent ON rft.task ((features ->> 'parent_experience_id')) WHERE features ? 'parent_experience_id';
