"""Text of models: vocabularies, chat templates, streams of tokens becoming text, grammars of answers."""
