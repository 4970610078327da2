//! KV pages: which are free.

/// Free pages of a fixed pool, handed out lowest number first.
#[derive(Clone, Debug)]
pub struct PagePool {
    free: Vec<u32>,
    total: usize,
}

impl PagePool {
    /// A pool of `total` free pages.
    pub fn new(total: usize) -> Self {
        Self { free: (0..total as u32).rev().collect(), total }
    }

    /// Pages not in use.
    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// Pages in all.
    pub fn total(&self) -> usize {
        self.total
    }

    /// Takes `count` pages, or none if there are too few.
    pub fn take(&mut self, count: usize) -> Option<Vec<u32>> {
        let left = self.free.len().checked_sub(count)?;
        let mut pages = self.free.split_off(left);
        pages.reverse();
        Some(pages)
    }

    /// Gives pages back.
    ///
    /// # Panics
    /// If a page is given back twice: two slots would share it.
    pub fn give(&mut self, pages: impl IntoIterator<Item = u32>) {
        for page in pages {
            assert!(
                (page as usize) < self.total && !self.free.contains(&page),
                "page {page} is free"
            );
            self.free.push(page);
        }
        self.free.sort_unstable_by(|a, b| b.cmp(a));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_come_back() {
        let mut pool = PagePool::new(4);
        assert_eq!(pool.take(3), Some(vec![2, 1, 0].into_iter().rev().collect()));
        assert_eq!(pool.take(2), None);
        assert_eq!(pool.free(), 1);
        pool.give([1]);
        assert_eq!(pool.take(2), Some(vec![1, 3]));
    }

    #[test]
    #[should_panic(expected = "page 1 is free")]
    fn a_page_is_not_given_back_twice() {
        let mut pool = PagePool::new(2);
        pool.give([1]);
    }
}
