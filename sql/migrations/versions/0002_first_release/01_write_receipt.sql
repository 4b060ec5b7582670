-- Receipts by run: writers of two runs may choose the same one.

ALTER TABLE rft.write_receipt DROP CONSTRAINT write_receipt_pkey, ADD PRIMARY KEY (run_id, receipt);
COMMENT ON TABLE rft.write_receipt IS 'A committed write into a run, for which a retry with the same receipt inserts nothing.';
COMMENT ON COLUMN rft.write_receipt.receipt IS 'Created by the writer before its first try; unique within the run.';
