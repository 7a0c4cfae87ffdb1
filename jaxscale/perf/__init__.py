"""What measures training instead of doing it; scripts alone import it."""
