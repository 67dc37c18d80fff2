"""What is asked and how an answer is judged: problems, prompts, graders, evaluation."""
