"""Files of rows and files of answers: formats in, formats out."""
