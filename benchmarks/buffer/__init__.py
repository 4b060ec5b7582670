"""The experience buffer: writes, draws, exchange, archives and questions, beside other stores."""
