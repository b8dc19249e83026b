// Sphinx's own scores, save for the function: a heading that holds all of the query comes first, and among equals a page
// that answers questions.
var Scorer = {
  score: ([docName, title, anchor, description, score, fileName, kind]) =>
    score + (kind === "title" ? 20 : 0) + (docName.startsWith("help/") ? 1 : 0),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
