// How many shapes each visible figure has.
Array.from(document.querySelectorAll(".plot svg")).filter((svg) => svg.getClientRects().length)
  .map((svg) => svg.querySelectorAll("path,rect,circle").length)
