"""What the test modules share: an application, real processes and servers, messages, rows."""
