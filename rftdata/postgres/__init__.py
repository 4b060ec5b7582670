"""PostgreSQL: connections, named queries, migrations, COPY, NOTIFY, and the embedded server."""
