//! KV pages: which are free, and which tokens lie in one.

use std::ops::Range;

use lily_ops::plan::PAGE_TOKENS;

/// Free pages of a fixed pool, handed out lowest number first.
#[derive(Clone, Debug)]
pub struct PagePool {
    free: Vec<bool>,
    count: usize,
    /// No page below is free.
    lowest: usize,
}

impl PagePool {
    /// A pool of `total` free pages.
    pub fn new(total: usize) -> Self {
        Self { free: vec![true; total], count: total, lowest: 0 }
    }

    /// Pages not in use.
    pub fn free(&self) -> usize {
        self.count
    }

    /// Pages in all.
    pub fn total(&self) -> usize {
        self.free.len()
    }

    /// Takes `count` pages, or none if there are too few.
    pub fn take(&mut self, count: usize) -> Option<Vec<u32>> {
        self.count = self.count.checked_sub(count)?;
        let mut pages = Vec::with_capacity(count);
        while pages.len() < count {
            if std::mem::take(&mut self.free[self.lowest]) {
                pages.push(self.lowest as u32);
            }
            self.lowest += 1;
        }
        Some(pages)
    }

    /// Gives pages back.
    ///
    /// # Panics
    /// If a page is given back twice: two slots would share it.
    pub fn give(&mut self, pages: impl IntoIterator<Item = u32>) {
        for page in pages {
            let used = self.free.get_mut(page as usize).filter(|free| !**free);
            *used.unwrap_or_else(|| panic!("page {page} is free")) = true;
            self.count += 1;
            self.lowest = self.lowest.min(page as usize);
        }
    }
}

/// Cuts a range of tokens where one page ends and the next begins.
pub fn page_runs(tokens: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let end = tokens.end;
    let next = move |from: usize| (from / PAGE_TOKENS + 1).saturating_mul(PAGE_TOKENS).min(end);
    let first = (!tokens.is_empty()).then_some(tokens.start);
    std::iter::successors(first, move |from| Some(next(*from)).filter(|to| *to < end))
        .map(move |from| from..next(from))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_end_where_pages_end() {
        let cut = |range| page_runs(range).collect::<Vec<_>>();
        assert!(cut(0..0).is_empty());
        assert!(cut(300..300).is_empty());
        assert_eq!(cut(0..256), vec![0..256]);
        assert_eq!(cut(0..600), [0..256, 256..512, 512..600]);
        assert_eq!(cut(255..257), [255..256, 256..257]);
        assert_eq!(cut(300..400), vec![300..400]);
        assert_eq!(cut(256..513), [256..512, 512..513]);
    }

    #[test]
    fn pages_come_back() {
        let mut pool = PagePool::new(4);
        assert_eq!(pool.take(3), Some(vec![0, 1, 2]));
        assert_eq!(pool.take(2), None);
        assert_eq!((pool.free(), pool.total()), (1, 4));
        pool.give([1]);
        assert_eq!(pool.take(2), Some(vec![1, 3]));
        assert_eq!(pool.take(0), Some(vec![]));
        assert_eq!(pool.take(1), None);
        pool.give([3, 0, 2, 1]);
        assert_eq!(pool.take(4), Some(vec![0, 1, 2, 3]));
    }

    #[test]
    #[should_panic(expected = "page 1 is free")]
    fn a_page_is_not_given_back_twice() {
        let mut pool = PagePool::new(2);
        pool.give([1]);
    }

    #[test]
    #[should_panic(expected = "page 2 is free")]
    fn a_page_that_does_not_exist_is_not_given_back() {
        PagePool::new(2).give([2]);
    }
}
